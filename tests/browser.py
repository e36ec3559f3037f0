"""A real browser for tests: headless Chromium, driven by chromedriver over plain HTTP (W3C WebDriver). Nothing of PyPI is needed.

    with browser.opened() as page:
        page.width(390)
        page.open("http://127.0.0.1:8103/")  # or the URI of a file
        page.dom(), page.console(), page.script("return …"), page.overflow(), page.screenshot(path)

Where Chromium or chromedriver is missing a test is skipped; with FEDSTILL_BROWSER=required, as CI sets it, that is an error.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
START = 60.0  # seconds in which chromedriver must answer, on a busy machine
DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # this machine, whatever proxy the environment names


def programs() -> tuple[str, str]:
    """Return the paths of Chromium and chromedriver; skip the test, or fail where they are required, if one is missing."""
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    missing = "chromium and chromedriver are needed (Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("FEDSTILL_BROWSER") == "required":
        pytest.fail(missing)
    pytest.skip(missing)


class Page:
    """One tab of a browser."""

    def __init__(self, driver: str, browser: str, profile: Path) -> None:
        self._driver = driver
        options = {"binary": browser, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})["sessionId"]

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._do("POST", "url", {"url": url})

    def width(self, pixels: int, height: int = 900) -> None:
        """Make the window so wide, as a phone or a screen is."""
        metrics = {"width": pixels, "height": height, "deviceScaleFactor": 1, "mobile": pixels < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Prefer "light" or "dark"."""
        self._devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})

    def script(self, source: str, *arguments: Any) -> Any:
        """Return what a script's body returns."""
        return self._do("POST", "execute/sync", {"script": source, "args": arguments})

    def dom(self) -> str:
        """Return the document as it is now, as HTML."""
        return str(self.script("return document.documentElement.outerHTML"))

    def overflow(self) -> int:
        """Return by how many pixels the document is wider than the window."""
        return int(self.script("return document.documentElement.scrollWidth - window.innerWidth"))

    def clipped(self) -> list[str]:
        """Return elements that reach beyond the window's right or left edge, but for those that are hidden on purpose."""
        return list(
            self.script("""return [...document.querySelectorAll('body *')].filter(e => {
              const b = e.getBoundingClientRect();
              return b.width > 1 && b.height > 1 && (b.right > window.innerWidth + 0.5 || b.left < -0.5);
            }).map(e => e.tagName + '.' + e.className + ' ' + (e.textContent || '').slice(0, 60))""")
        )

    def console(self) -> list[str]:
        """Return the console's messages since the last time, errors of loading and of the content policy included."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._do("POST", "se/log", {"type": "browser"})]

    def wait(self, source: str, seconds: float = 20.0) -> Any:
        """Wait until a script's body returns something true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.script(source)):
            assert time.monotonic() < end, f"never true: {source}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> Path:
        """Write a picture of the whole page, a PNG."""
        size = self._devtools("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        self._ask("DELETE", f"/session/{self._session}")

    def _devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self._do("POST", "goog/cdp/execute", {"cmd": command, "params": params})

    def _do(self, method: str, command: str, body: dict[str, Any]) -> Any:
        return self._ask(method, f"/session/{self._session}/{command}", body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with DIRECT.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode(errors="replace")[:2000]) from None


@contextmanager
def opened() -> Iterator[Page]:
    """Yield a tab of a new browser with a profile of its own; end both afterwards."""
    browser, driver = programs()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "driver.log"
        with log.open("wb") as out:
            process = subprocess.Popen([driver, f"--port={port}"], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + START
            while True:
                try:
                    with DIRECT.open(f"http://127.0.0.1:{port}/status", timeout=5):
                        break
                except OSError:
                    assert process.poll() is None, log.read_text(errors="replace")
                    assert time.monotonic() < end, log.read_text(errors="replace")
                    time.sleep(0.05)
            page = Page(f"http://127.0.0.1:{port}", browser, Path(folder) / "profile")
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            process.wait(20)
