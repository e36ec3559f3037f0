"""The commands that take models out of finished runs: `export` and `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import InputError, Shown
from ..run import export as exporting
from ..run.frame import to_csv
from ..run.load import load
from ..run.predict import predict as ask
from ..run.result import Run
from . import flags
from .screen import say

SHOWN = 10  # predictions that are printed
FORMATS = ", ".join(exporting.FORMATS)
CLIENT = "the client, by number or name, whose own model is taken"


def export(argv: Sequence[str]) -> None:
    """`fedstill export RUN`."""
    parser = flags.Parser(
        "export",
        "Write a model of a finished run to a file: a client's own, or the one for everybody. The suffix says in which format: "
        "safetensors (a state dict for load_state_dict), onnx (needs fedstill[export]), pt2 (torch.export). Each file is loaded "
        "again and must give the same predictions, to 1e-5. Its metadata names model, client, classes, method and contract. "
        "Of a run with --lora, a path without a suffix is a new folder for the adapters alone, as peft writes them.",
        "RUN",
        (
            "fedstill export runs/first --client 7 --to model.safetensors",
            "fedstill export runs/first --generic --to model.onnx",
            "fedstill export runs/first --all models --format pt2",
            "fedstill export runs/lora --client 7 --to model.safetensors --merge",
            "fedstill export runs/lora --client 7 --to adapter",
        ),
    )
    group = parser.add_argument_group("results")
    flags.plain(parser, group, "client", CLIENT, "CLIENT", "a client's number or name")
    _generic(parser, group)
    flags.plain(parser, group, "to", "the file to write", "FILE", f"a file that ends in {FORMATS}")
    flags.plain(
        parser, group, "all", "write the models of all clients, and the one for everybody", "DIR", "a new folder"
    )
    help = "the files' format with --all [default safetensors]"
    flags.plain(parser, group, "format", help, "FORMAT", "safetensors, onnx or pt2")
    group.add_argument("--merge", action="store_true", help="add LoRA's adapters into the weights that they adapt")
    parser.takes["merge"] = "left without a value"
    read = _read(parser, argv)
    if read is None:
        return
    given, folder = read
    if "all" in given:
        for name in ("client", "generic", "to"):
            if name in given:
                raise InputError(
                    flags.flag(name), Shown(str(given[name])), "left out with --all, which writes all models"
                )
        suffix = "." + given.get("format", "safetensors").removeprefix(".")
        if suffix not in exporting.FORMATS:
            raise InputError("--format", given["format"], FORMATS.replace(".", ""))
        run, done = _run(folder), 0
        for one in exporting.export_all(run, given["all"], suffix, "merge" in given):
            say(str(one))
            done += 1
        say(f"{done} models in {given['all']}")
        return
    if "format" in given:
        raise InputError("--format", given["format"], "left out without --all: the suffix of --to says the format")
    if "to" not in given:
        raise InputError("--to", Shown("nothing"), f"a file that ends in {FORMATS} (or --all DIR)")
    client = _client(given)
    path = exporting.check_path(given["to"])
    say(str(exporting.export(_run(folder), path, client, "merge" in given)))


def predict(argv: Sequence[str]) -> None:
    """`fedstill predict RUN`."""
    parser = flags.Parser(
        "predict",
        "Classify samples with a model of a finished run: a client's own, or the one for everybody. Samples are read and "
        "normalised as the run's own were. Where they have labels (a column label or y, an array y, class folders), the accuracy "
        "is printed as well.",
        "RUN",
        (
            "fedstill predict runs/first --client 7 --data new.csv",
            "fedstill predict runs/first --generic --data photographs --out predictions.csv",
        ),
    )
    group = parser.add_argument_group("results")
    flags.plain(parser, group, "client", CLIENT, "CLIENT", "a client's number or name")
    _generic(parser, group)
    what = "a CSV or npz file, an image, or a folder of these (also of class folders of images)"
    flags.plain(parser, group, "data", what, "PATH", "a file or a folder")
    help = "write a row for each sample [default the first are printed]"
    flags.plain(parser, group, "out", help, "FILE.csv", "a file that ends in .csv")
    read = _read(parser, argv)
    if read is None:
        return
    given, folder = read
    if "data" not in given:
        raise InputError("--data", Shown("nothing"), "a file or a folder of samples")
    out = Path(given["out"]) if "out" in given else None
    if out is not None and out.suffix.lower() != ".csv":
        raise InputError("--out", given["out"], "a file that ends in .csv")
    client = _client(given)
    predictions = ask(_run(folder), given["data"], client)
    for note in predictions.notes:
        say(note)
    rows = list(predictions.rows())
    if out is not None:
        files.write(out, to_csv(rows).encode())
    else:
        width = max(len(row["sample"]) for row in rows[:SHOWN])
        for row in rows[:SHOWN]:
            say(f"{row['sample']:<{width}}  {_words(row)}")
        if len(rows) > SHOWN:
            say(f"… and {len(rows) - SHOWN:,} more: --out predictions.csv writes all")
    if predictions.accuracy is not None:
        if predictions.objective.name == "classification":
            right = sum(row["right"] for row in rows)
            say(f"accuracy {100 * predictions.accuracy:.2f} % ({right:,} of {len(rows):,} right)")
        else:
            words = predictions.measure.words(predictions.accuracy)
            say(words if not predictions.measure.share else f"{predictions.measure.title} {words}")
    if out is not None:
        say(f"{len(rows):,} predictions: {out}")


def _words(row: dict[str, Any]) -> str:
    """Return a prediction in a line."""
    if "class" in row:
        label = f"  ({row['label']})" if "label" in row and not row["right"] else ""
        return f"{row['class']}  {100 * row['probability']:5.1f} %{label}"
    if "labels" in row:
        truth = f"  ({row['truth']})" if row.get("truth", row["labels"]) != row["labels"] else ""
        return f"{row['labels']}{truth}"
    if "classes" in row:
        return str(row["classes"])
    values = {name: value for name, value in row.items() if name != "sample"}
    only = [f"{value:.6g}" for name, value in values.items() if name == "value"]
    known = [f"({value:.6g})" for name, value in values.items() if name == "true value"]
    return "  ".join([*only, *known] or [f"{name} {value:.6g}" for name, value in values.items()])


def _generic(parser: flags.Parser, group: Any) -> None:
    group.add_argument("--generic", action="store_true", help="take the model for everybody")
    parser.takes["generic"] = "left without a value"


def _read(parser: flags.Parser, argv: Sequence[str]) -> tuple[dict[str, Any], Path] | None:
    """Return the flags and the folder of a command line, or print help and return None."""
    given, words = parser.read(argv)
    if "help" in given:
        parser.print_help()
        return None
    if len(words) != 1:
        raise InputError("folder", Shown(" ".join(words) or "nothing"), "the folder of one run, which --out made")
    return given, Path(words[0])


def _client(given: Mapping[str, Any]) -> str | None:
    """Return the client that flags name; None for the generic model."""
    if ("client" in given) == ("generic" in given):
        raise InputError(
            "--client", Shown(str(given.get("client", "nothing"))), "a client's number or name, or --generic"
        )
    return given.get("client")


def _run(folder: Path) -> Run:
    """Return the run in a folder; refuse a folder of several."""
    found = load(folder)
    if isinstance(found, Run):
        return found
    inside = next(run.folder for runs in found.values() for run in runs)
    raise InputError("folder", str(folder), f"that of one run; this one holds several, such as {inside}")
