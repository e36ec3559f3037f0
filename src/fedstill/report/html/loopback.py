"""A read-only server on loopback: it answers GET with what a function returns for a path, to this machine alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from ...core.errors import InputError, first_line

HOST = "127.0.0.1"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Answer: TypeAlias = tuple[str, str]  # the kind of a text, as text/html, and the text


def server(answer: Callable[[str], Answer | None], policy: str, port: int, flag: str) -> ThreadingHTTPServer:
    """Return a server of what `answer` returns for a path; None is "not here". Port 0 is any that is free.

    `policy` is the Content-Security-Policy of all answers, `flag` what an error about the port names.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "fedstill", "", 10

        def do_GET(self) -> None:
            """Answer, unless another site's name was made to lead here."""
            names = {f"{name}:{made.server_port}" for name in (HOST, "localhost")}
            if self.headers.get("Host", "") not in names:
                self._answer(403, "text/plain", "this page is for this machine\n")
            elif (found := answer(self.path)) is not None:
                self._answer(200, *found)
            else:
                self._answer(404, "text/plain", "not here\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            headers: Mapping[str, str] = {
                **{"Content-Security-Policy": policy, **HEADERS, "Content-Type": f"{kind}; charset=utf-8"}
            }
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    try:
        made = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise InputError(flag, port, f"a port that is free on {HOST} ({first_line(error)})") from None
    made.daemon_threads = True
    return made
