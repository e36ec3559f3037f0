"""Opens pages in headless Chromium, over its debugging pipe: no driver, no port, no network.

Where there is no Chromium a test that needs one is skipped; FEDSTILL_BROWSER=required makes that a failure, as in CI.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0


def executable() -> str | None:
    """Return Chromium's path; None where there is none. Raise where there must be one."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None and os.environ.get("FEDSTILL_BROWSER") == "required":
        raise AssertionError("FEDSTILL_BROWSER=required, and there is no Chromium")
    return found


class Page:
    """One tab. Whatever the page says on its console, or refuses, is in `messages`."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._count = write, read, b"", 0
        self.messages: list[str] = []
        self._events: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the tab and return its result."""
        return self._send(method, self._session, **params)

    def open(self, address: str, width: int, height: int = 900, dark: bool = False) -> None:
        """Open an address at a width, and wait until it has loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.messages.clear()
        self._events.clear()
        self.send("Page.navigate", url=address)
        end = time.monotonic() + SECONDS
        while "Page.loadEventFired" not in self._events:
            self._receive(end)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def script(self, body: str) -> Any:
        """Return what the body of a function returns."""
        return self.run(f"(() => {{ {body} }})()")

    def wait(self, body: str, seconds: float = 20.0) -> Any:
        """Wait until the body of a function returns something true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.script(body)):
            assert time.monotonic() < end, f"never true: {body}"
            time.sleep(0.05)
        return value

    def overflow(self) -> int:
        """Return by how many pixels the document is wider than the window."""
        return int(self.run("document.documentElement.scrollWidth - window.innerWidth"))

    def clipped(self) -> list[str]:
        """Return elements that reach beyond the window's right or left edge."""
        return list(
            self.run("""[...document.querySelectorAll('body *')].filter(e => {
              const b = e.getBoundingClientRect();
              return b.width > 1 && b.height > 1 && (b.right > window.innerWidth + 0.5 || b.left < -0.5);
            }).map(e => e.tagName + '.' + e.className + ' ' + (e.textContent || '').slice(0, 60))""")
        )

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path, whole: bool = True, height: int | None = None) -> Path:
        """Write a picture of the page, or of its top."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        options = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png", **options)["data"]))
        return file

    def _send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            answer = self._receive(end)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self, end: float) -> dict[str, Any]:
        """Return the next message, and note what it says."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.messages.append(f"{params['type']}: {[arg.get('value') for arg in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")
        return message


@contextlib.contextmanager
def opened() -> Iterator[Page]:
    """Yield a tab of a new browser; skip the test, or fail where one is required, if there is none."""
    path = executable()
    if path is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    with chromium(path) as page:
        yield page


@contextlib.contextmanager
def chromium(path: str) -> Iterator[Page]:
    """Start a browser with an empty profile, and end it."""
    to_child, write = os.pipe()
    read, from_child = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = shlex.join([path, *FLAGS, f"--user-data-dir={profile}"])
        shell = f"exec {command} 3<&{to_child} 4>&{from_child}"
        process = subprocess.Popen(
            ["bash", "-c", shell], pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(from_child)
        try:
            yield Page(write, read)
        finally:
            os.close(write)  # the browser ends with its pipe
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(read)
