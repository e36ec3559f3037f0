"""HTML and SVG as text: elements whose contents and attributes are escaped unless they are markup already."""

from __future__ import annotations

import html
from collections.abc import Iterable
from urllib.parse import quote

VOID = frozenset(("meta", "link", "br", "input", "hr", "path", "rect", "line", "circle", "use", "polyline"))


class Html(str):
    """Markup: text that is escaped already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Return a text as markup; markup stays as it is."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    """Put parts one after another."""
    return Html(between.join(escape(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element. `cls` is class, an underscore a hyphen (`stroke_width`); None and False leave an attribute out.

    >>> tag("a", "x < y", href="#a", cls="wide", hidden=True)
    '<a href="#a" class="wide" hidden>x &lt; y</a>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = {"cls": "class", "for_": "for", "view_box": "viewBox"}.get(name, name.replace("_", "-"))
    if value is True:
        return f" {name}"
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(text, quote=True)}"'


def data_uri(text: str, kind: str) -> str:
    """Return a link that holds a text.

    >>> data_uri("a,b", "text/csv")
    'data:text/csv;charset=utf-8,a,b'
    """
    return f"data:{kind};charset=utf-8,{quote(text, safe=' ,:;+-._~()/!*=@')}".replace(" ", "%20")


def download(words: str, text: str, name: str, kind: str = "text/csv") -> Html:
    """Return a link that saves a text as a file."""
    return tag("a", words, href=data_uri(text, kind), download=name, cls="get")


def csv(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV; a number has as many digits as it needs."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in (header, *rows))


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    if text[:1] in ("=", "+", "-", "@") and not isinstance(value, int | float):
        text = f"'{text}"  # no formula in a spreadsheet
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n\r') else text
