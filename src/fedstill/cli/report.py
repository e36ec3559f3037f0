"""The command `report`: one page of results from the folders of runs, without data and without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.errors import InputError, Shown
from ..report.html import page
from . import flags
from .screen import say


def report(argv: Sequence[str]) -> None:
    """`fedstill report FOLDER …`."""
    parser = flags.Parser(
        "report",
        "Write report.html: which method is best and whether that is shown, for which clients it pays to join, curves, "
        "distributions, costs and settings, in one file that needs nothing else to be opened. FOLDER is what --out made, of a "
        "run, a comparison or a sweep; several are set side by side. 'run', 'compare' and 'sweep' with --out end with it.",
        "FOLDER …",
        (
            "fedstill report runs/all",
            "fedstill report runs/all --method fedrep",
            "fedstill report runs/monday runs/tuesday --out both.html",
        ),
    )
    group = parser.add_argument_group("results")
    where = "the page's file [default FOLDER/report.html; needed for several folders]"
    flags.plain(parser, group, "out", where, "FILE.html", "a file that ends in .html")
    asked = "draw this one in colour and show its clients one by one [default the best]"
    flags.plain(parser, group, "method", asked, "METHOD", "a method, or a label, of the results")
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if not words or len(set(words)) < len(words):
        given = Shown(" ".join(words) or "nothing")
        raise InputError("folder", given, "folders that --out made, each once: fedstill report FOLDER …")
    out = flag_values.get("out")
    if out is not None and not out.endswith(".html"):
        raise InputError("--out", out, "a file that ends in .html")
    if out is None and len(words) > 1:
        raise InputError("--out", Shown("nothing"), "a file for the page of several folders, such as both.html")
    folders = [Path(word) for word in words]
    for folder in folders:
        if not folder.is_dir():
            raise InputError("folder", str(folder), "a folder that --out made")
    say(f"report: {page.write(folders, None if out is None else Path(out), flag_values.get('method', ''))}")
