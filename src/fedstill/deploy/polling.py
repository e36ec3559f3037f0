"""The loop of a site: ask the hub for orders, have them carried out, send the replies.

Messages are a header (JSON) and bytes. A site says `hello` (what its data is like), `ask`, `prepared`, `reply` or
`failed`; the hub answers
`hello` (introduce yourself), `prepare` (give sums, before a run), `open` (set up a run), `order`, `wait` or `refused`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..core.errors import InputError, Shown, TrainingError
from ..core.memory import available
from ..core.reading import Unreadable, parse_json
from ..core.version import __version__
from .site import SiteClient

PAUSE = 0.5  # seconds before a hub that could not be reached is asked again
Send: TypeAlias = Callable[[Mapping[str, Any], bytes], tuple[dict[str, Any], bytes]]
"""Sends the hub a header and bytes, and returns its answer; raises `Unreachable`."""


class Unreachable(ConnectionError):
    """The hub does not answer: it is away, or the network is."""


def attend(site: SiteClient, send: Send, stop: threading.Event, on_known: Callable[[], object] = lambda: None) -> None:
    """Ask the hub for orders and send it the replies, until `stop` is set; raises `InputError` if the hub refuses this site.

    `on_known` is called whenever the hub has come to know the site.
    """
    introduced = False
    while not stop.is_set():
        try:
            asking = {"do": "ask", "run": None if site.key is None else list(site.key)}
            # introduce this site first, also to a hub that knows it: its data may be new
            unknown: tuple[dict[str, Any], bytes] = ({"do": "hello"}, b"")
            answer, body = send(asking, b"") if introduced else unknown
            do = answer.get("do")
            if do == "hello":
                about = {**site.data.about(), "machine": machine()}
                answer, _ = send({"do": "hello", "version": __version__, "about": about}, b"")
                why = answer.get("refused") or (answer.get("why") if answer.get("do") == "refused" else "")
                if why:
                    raise InputError("site", Shown("refused by the hub"), str(why)[:300])
                introduced = True
                site.log("the hub knows this site")
                on_known()
            elif do == "open":
                try:
                    made = {"preparation": parse_json(body)} if body else {}
                    site.open({**answer["about"], **made})
                    site.background.start()
                except (InputError, TrainingError, Unreadable) as error:
                    site.log(f"cannot take part: {error}")
                    send({"do": "failed", "why": str(error)}, b"")
                    stop.wait(PAUSE)
            elif do == "prepare":
                try:
                    send({"do": "prepared", "id": answer.get("id")}, site.prepare(body))
                except InputError as error:
                    site.log(f"cannot take part: {error}")
                    send({"do": "failed", "why": str(error)}, b"")
                    stop.wait(PAUSE)
            elif do == "order":
                reply, delivered = site.handle(body), False
                while not delivered and not stop.is_set():  # a hub that is away for a while gets it when it is back
                    try:
                        response, _ = send({"do": "reply", "run": answer["run"]}, reply)
                        delivered = True
                        if response.get("why"):
                            site.log(f"the hub did not take a reply: {response['why']}")
                    except Unreachable:
                        stop.wait(PAUSE)
                site.background.start()
            elif do == "refused":
                raise InputError("site", Shown("refused by the hub"), str(answer.get("why")))
            elif do != "wait":
                raise InputError("hub", Shown(str(answer)[:100]), f"one of fedstill {__version__}")
        except Unreachable:
            stop.wait(PAUSE)


def machine() -> dict[str, Any]:
    """Return what the hub is told of this machine: its clock, free memory and disk."""
    return {"clock": time.time(), "memory": available(), "disk": shutil.disk_usage(".").free}
