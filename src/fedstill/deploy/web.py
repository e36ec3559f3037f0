"""The hub's page on loopback: a server that reads the hub's folder and writes nothing, beside the hub's own process."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from ..core.errors import InputError, first_line
from .folders import Hub
from .page import look, page, part

HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {"/style.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml"}


def server(hub: Hub, port: int) -> ThreadingHTTPServer:
    """Return a server of the hub's page on loopback; port 0 is any that is free."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "fedstill", "", 10

        def do_GET(self) -> None:
            """Answer with the page, the part of it that changes, or a file of ours."""
            names = {f"{name}:{made.server_port}" for name in (HOST, "localhost")}
            if self.headers.get("Host", "") not in names:  # another site's name that was made to lead here
                self._answer(403, "text/plain", "this page is for this machine\n")
            elif self.path in ("/", "/part"):
                view = look(hub)
                self._answer(200, "text/html", page(view) if self.path == "/" else part(view))
            elif self.path in FILES:
                self._answer(
                    200, FILES[self.path], files(__package__).joinpath("static", self.path[1:]).read_text("utf-8")
                )
            else:
                self._answer(404, "text/plain", "not here\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    try:
        made = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise InputError("--web", port, f"a port that is free on {HOST} ({first_line(error)})") from None
    made.daemon_threads = True
    return made
