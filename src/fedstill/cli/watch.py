"""The command `watch`: the report's page while runs go on, on this machine alone, until they end or Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import InputError, Shown
from ..report.html import loopback
from ..report.html.live import Live, at_work, progress_of
from . import flags
from .screen import say

POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # the page itself has a stricter one of its own
LINGER = 6.0  # seconds after the end in which open pages still take the last state


def watch(argv: Sequence[str]) -> None:
    """`fedstill watch RUN`."""
    parser = flags.Parser(
        "watch",
        "Show runs that go on as a page: progress, time left, curves, clients and refusals, which renews itself. RUN is the "
        "folder of a run, a comparison or a sweep that another terminal runs. It reads the folder and writes nothing, answers "
        "this machine alone, and ends with the runs or by Ctrl-C, which leaves the runs alone.",
        "RUN",
        ("fedstill watch runs/all", "fedstill watch runs/all --port 8103"),
    )
    group = parser.add_argument_group("page")
    flags.plain(parser, group, "port", "on 127.0.0.1 [default any that is free]", "PORT", "a port")
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if len(words) != 1:
        raise InputError("folder", Shown(" ".join(words) or "nothing"), "one folder of a run: fedstill watch RUN")
    root = Path(words[0])
    runs = progress_of(root)
    if not at_work(root):
        over = all(run.over for run in runs)
        right = f"'fedstill report {root}' shows what is over" if over else f"'fedstill resume {root}' goes on"
        raise InputError("folder", str(root), f"one in which runs go on; {right}")
    serve(root, flags.whole_number(flag_values, "port", 0, least=0))


def serve(root: Path, port: int = 0) -> None:
    """Serve the page until the runs are over."""
    live = Live(root)

    def answer(path: str) -> loopback.Answer | None:
        if path not in ("/", "/part"):
            return None
        return "text/html", live.page() if path == "/" else live.part()

    with loopback.server(answer, POLICY, port, "--port") as server:
        say(
            f"{root}: http://{loopback.HOST}:{server.server_port} (this machine only; Ctrl-C ends the page, not the runs)"
        )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        try:
            while at_work(root):
                time.sleep(0.5)
            time.sleep(LINGER)
            say(
                "finished"
                if all(run.over for run in progress_of(root))
                else f"stopped: 'fedstill resume {root}' goes on"
            )
        except KeyboardInterrupt:
            say("the page is closed; the runs go on")
        finally:
            server.shutdown()
