"""The hub's page on loopback: a server that reads the hub's folder and writes nothing, beside the hub's own process."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from importlib.resources import files

from ..report.html import loopback
from .folders import Hub
from .page import look, page, part

HOST = loopback.HOST
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {"/style.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml"}


def server(hub: Hub, port: int) -> ThreadingHTTPServer:
    """Return a server of the hub's page on loopback; port 0 is any that is free."""

    def answer(path: str) -> loopback.Answer | None:
        """Return the page, the part of it that changes, or a file of ours."""
        if path in ("/", "/part"):
            view = look(hub)
            return "text/html", page(view) if path == "/" else part(view)
        if path in FILES:
            return FILES[path], files(__package__).joinpath("static", path[1:]).read_text("utf-8")
        return None

    return loopback.server(answer, POLICY, port, "--web")
