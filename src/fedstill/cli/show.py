"""The commands that list what is available: methods, models, data."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import models as model_registry
from ..core import settings
from ..core.errors import InputError, nearest
from ..core.method import Method
from ..data import catalogue
from ..data.download import REMOTES
from ..data.source import root_of
from ..methods import METHODS, get
from ..report import figures
from ..report.fit import hanging
from ..report.text import partition_of
from ..run import prepare
from ..run.experiment import Experiment
from . import flags, screen
from .screen import say

PARTITIONS = {
    "auto": "by owner or domain where the data has them, else dirichlet:0.1",
    "iid": "equal sizes, samples at random",
    "dirichlet:α": "each class divided by shares from Dir(α): the smaller α, the more uneven classes and sizes",
    "balanced-dirichlet:α": "the same with equal sizes",
    "shards:s": "sorted by label and cut into shards, s of them to each client",
    "classes:S": "exactly S classes to each client",
    "classes:S,lognormal:σ": "the same, sizes by lognormal(0, σ)",
    "lognormal:σ": "samples at random, sizes by lognormal(0, σ)",
    "domain": "one client for each domain, as in --data mnist+usps",
    "owner": "one client for each owner that the data names (silos, synthetic)",
    "file:PATH": "as a saved partition.json says",
}
OWN = (
    ("A+B[@SIZE]", "several of these, each a domain; @SIZE resizes the images"),
    ("FILE.npz", "your arrays: x, y (or train_x, train_y, test_x, test_y)"),
    ("FOLDER[@SIZE]", "your images in class folders (also train/… and test/…, or domain/class/…)"),
    ("FOLDER", "your silos: one CSV or npz file for each client (--label, --impute, --encode, --normalise)"),
    ("FILE.csv", "one table, dealt to clients by --partition"),
    (
        "FOLDER",
        "your npy files, which may be larger than the memory: x.npy and y.npy, or a folder with these for each client",
    ),
    ("hf:FOLDER[@SIZE]", "a Hugging Face data set that save_to_disk wrote; --label, --input, --owner name its columns"),
)
FIELDS = (
    "data", "data_root", "label", "input", "owner", "ignore", "impute", "encode", "normalise", "clients", "partition", "split",
    "pool", "seed", "objective", "memory_map",
)  # fmt: skip
SUFFIXES = (".png", ".pdf", ".svg")


def methods(argv: Sequence[str]) -> None:
    """`fedstill methods [NAME]`."""
    about = "List the methods with their flags; with NAME also the method's equations and the choices it makes."
    line = _read(flags.Parser("methods", about, "[NAME]", ("fedstill methods", "fedstill methods pfedsd")), argv, 1)
    if line is None:
        return
    _, words = line
    if words:
        cls = get(words[0])
        doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
        say("\n".join([doc, "", *_method(cls)]))
        return
    for cls in METHODS.values():
        say("\n".join([*_method(cls), ""]))
    say("'fedstill methods NAME' shows equations and choices, 'fedstill run NAME' runs it.")


def _method(cls: type[Method]) -> list[str]:
    """Return a line about a method, and one for each of its flags."""
    about = (inspect.getdoc(cls) or "").partition("\n")[0]
    lines = [hanging(f"{cls.id:<10} ", f"{about}{f' ({cls.paper})' if cls.paper else ''}", screen.width())]
    types = settings.types_of(cls)
    own = settings.fields_of(cls)
    width = max((len(flags.flag(field.name)) for field in own), default=0)
    for field in own:
        head = f"    {flags.flag(field.name):<{width}}  "
        lines.append(hanging(head, flags.describe(field, types[field.name]), screen.width()))
    return lines


def models(argv: Sequence[str]) -> None:
    """`fedstill models`."""
    about = "List the models. Each fits its first layer to the data's shape and its last to the number of classes."
    if _read(flags.Parser("models", about, "", ("fedstill models",)), argv, 0) is None:
        return
    width = max(map(len, model_registry.MODELS))
    for name, (_, line) in model_registry.MODELS.items():
        say(hanging(f"{name:<{width}}  ", line, screen.width()))
    for name, line in model_registry.OTHERS.items():
        say(hanging(f"{name:<{width}}  ", line, screen.width()))
    say(
        "\n'--model NAME' takes one, with arguments by --model-args; from Python, fedstill.simulate takes any nn.Module."
    )


def data(argv: Sequence[str]) -> None:
    """`fedstill data` and `fedstill data show`."""
    if argv and not argv[0].startswith("-"):
        if argv[0] != "show":
            raise InputError("argument", argv[0], nearest(argv[0], ["show"]))
        return _show(argv[1:])
    about = "List the data sets and the partitions; 'fedstill data show' draws who has what."
    parser = flags.Parser("data", about, "[show]", ("fedstill data", "fedstill data show --partition shards:2"))
    flags.add(parser, Experiment, ("data_root",))
    line = _read(parser, argv, 0)
    if line is None:
        return
    root = flags.take(Experiment, line[0]).get("data_root") or None
    entries = catalogue(root)
    width = max(len(name) for name in (*(e.name for e in entries), *(n for n, _ in OWN), *PARTITIONS))
    room = screen.width()
    where = f"by name (files are under {root_of(root)}; --data-root or FEDSTILL_DATA names another folder)"
    say(hanging("--data: ", where, room))
    for entry in entries:
        about = f"{entry.line}{_presence(entry.present, entry.name, entry.files)}"
        say(hanging(f"  {entry.name:<{width}}  ", about, room))
    for name, about in OWN:
        say(hanging(f"  {name:<{width}}  ", about, room))
    say("\n--partition: how the samples are divided among --clients")
    for name, about in PARTITIONS.items():
        say(hanging(f"  {name:<{width}}  ", about, room))
    say("\n'fedstill data show --data NAME --partition P --clients N' draws who has what.")
    return None


def _presence(present: bool, name: str, files: Sequence[str]) -> str:
    """Return whether a data set's files are on this machine, and if not, what they are or that they can be downloaded."""
    if present:
        return " [here]" if files else ""
    return " [downloaded when first used]" if name in REMOTES else f" [needs {', '.join(files)}]"


def _show(argv: Sequence[str]) -> None:
    """`fedstill data show`."""
    about = "Draw how many samples of each class every client has, in the terminal and, with --out, as a picture."
    examples = ("fedstill data show", "fedstill data show --clients 50 --partition classes:2 --out who-has-what.png")
    parser = flags.Parser("data show", about, "", examples)
    group = parser.add_argument_group("results")
    flags.plain(parser, group, "out", "the picture's file [default none]", "FILE.png", "a file that ends in .png")
    flags.add(parser, Experiment, FIELDS)
    read = _read(parser, argv, 0)
    if read is None:
        return
    flag_values, _ = read
    out = picture(flag_values["out"]) if "out" in flag_values else None
    with flags.named(flag_values):
        experiment = Experiment(**flags.take(Experiment, flag_values))
        federation = prepare.federation_of(experiment)
    counts = federation.counts()
    screen.holdings(counts, federation.names, federation.labels)
    line = f"{experiment.data}: {len(federation)} clients by {partition_of(federation)}, seed {experiment.seed}"
    say(f"{line}; partition hash {federation.hash}")
    for said in federation.notes:
        say(said)
    if out is not None:
        note = (
            f"area of a bubble: a client's samples of a class in all its parts; partition hash {federation.hash[:12]}"
        )
        figures.bubbles(counts, out, line, note, federation.names, federation.labels)
        say(f"picture: {out}")


def picture(text: str) -> Path:
    """Return the file to draw into; refuse one that cannot be written, before any work."""
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        raise InputError("--out", text, f"a file that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise InputError("--out", text, "a file in a folder that exists")
    if not figures.available():
        raise InputError("--out", text, f"left out: {figures.MISSING}")
    return path


def _read(parser: flags.Parser, argv: Sequence[str], most: int) -> tuple[dict[str, Any], list[str]] | None:
    """Return the flags and at most `most` words of a command line, or print help and return None."""
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return None
    if len(words) > most:
        raise InputError("argument", words[most], f"left out ('fedstill {parser.command} --help')")
    return flag_values, words
