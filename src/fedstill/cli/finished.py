"""The command `show`: finished runs side by side, from their folders alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core import settings
from ..core.errors import InputError, Shown
from ..core.metric import measure_of
from ..core.reading import read_json, read_toml
from ..report import figures
from ..report.text import Facts, aligned, grouped, rows, scored
from ..run.evaluate import Evaluation
from ..run.experiment import Experiment
from ..run.journal import EXPERIMENT, PARTITION
from ..run.load import LARGEST, load
from ..run.prepare import PYTHON
from ..run.result import Run
from . import flags, show
from .screen import results, say

CONTRACT = ("score_model", "score_clients", "score_mean", "score_round", "score_metric")
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # rounds of a curve that are drawn


def finished(argv: Sequence[str]) -> None:
    """`fedstill show RUN…`."""
    parser = flags.Parser(
        "show",
        "Print finished runs side by side: the table that a run ends with, and accuracy by round. RUN is what --out made, of a "
        "run, a comparison, a sweep or several seeds. Neither data nor training is needed; --score-… choose another evaluation "
        "contract.",
        "RUN…",
        (
            "fedstill show runs/all",
            "fedstill show runs/monday runs/tuesday --out both.png",
            "fedstill show runs/all --clients --score-round best-val",
        ),
    )
    group = parser.add_argument_group("results")
    flags.plain(parser, group, "out", "draw curves and clients into this file", "FILE.png", "a file that ends in .png")
    group.add_argument("--clients", action="store_true", help="also print a row for each client, with its name")
    parser.takes["clients"] = "left without a value"
    flags.add(parser, Experiment, CONTRACT)
    given, words = parser.read(argv)
    if "help" in given:
        parser.print_help()
        return
    if not words or len(set(words)) < len(words):
        raise InputError("folder", Shown(" ".join(words) or "nothing"), "folders that --out made, each once")
    out = show.picture(given["out"]) if "out" in given else None
    contract = flags.take(Experiment, {name: value for name, value in given.items() if name in CONTRACT})
    with flags.named(given):
        runs = [_by(run, contract) for word in words for run in _runs(Path(word))]
        runs, facts, notes = _told_apart(runs)
        labelled = _ranked(runs, contract)
    results(runs, facts)
    for line in [*notes, *_unfinished(labelled)]:
        say(line)
    say()
    for line in curves(labelled, Evaluation.by(runs[0].training)):
        say(line)
    if "clients" in given:
        say()
        for line in clients(labelled):
            say(line)
    if out is not None:
        figures.compare_figure(labelled, out, facts)
        say(f"picture: {out}")


def _runs(folder: Path) -> list[Run]:
    found = load(folder)
    return [found] if isinstance(found, Run) else [run for runs in found.values() for run in runs]


def _by(run: Run, contract: Mapping[str, Any]) -> Run:
    """Return the run as it is scored by another contract."""
    return dataclasses.replace(run, training=dataclasses.replace(run.training, **contract)) if contract else run


def _ranked(runs: Sequence[Run], contract: Mapping[str, Any]) -> dict[str, list[Run]]:
    """Return the runs by label, in the order of the table; refuse a contract that none of them can fulfil."""
    groups = grouped(runs)
    lines = rows(runs)
    if contract and all(line.score is None for line in lines):
        own = Evaluation.by(runs[0].training)
        if own != Evaluation():
            runs[0].score(**settings.values_of(own))  # says why
    return {line.label: groups[line.label] for line in lines}


def _told_apart(runs: Sequence[Run]) -> tuple[list[Run], Facts, list[str]]:
    """Return the runs with what tells their data apart, the facts that all share, and a line for each that they do not."""
    facts = [_facts(run) for run in runs]
    names = [name for name in ("data", "clients", "partition", "model") if len({getattr(f, name) for f in facts}) > 1]
    apart = [{**run.beside, **{name: getattr(f, name) for name in names}} for run, f in zip(runs, facts, strict=True)]
    labelled = [dataclasses.replace(run, beside=beside) for run, beside in zip(runs, apart, strict=True)]
    same: dict[tuple[Any, ...], list[int]] = {}
    for i, run in enumerate(labelled):
        every = {**settings.values_of(run.training), **run.beside, **settings.values_of(run.method)}
        same.setdefault((run.method.id, *every.items()), []).append(i)
    for doubles in same.values():
        for i in doubles if len(doubles) > 1 else []:
            labelled[i] = dataclasses.replace(
                labelled[i], beside={**labelled[i].beside, "folder": str(labelled[i].folder)}
            )
    by_seed = {(run.training.seed, f.hashes): f.hashes[0] for run, f in zip(runs, facts, strict=True)}
    shared = dataclasses.replace(
        facts[0],
        **{name: 0 if name == "clients" else "" for name in names},  # type: ignore[arg-type]
        hashes=tuple(by_seed.values()) if not names else (),
    )
    notes = []
    for name in names:
        values = {
            label: dict.fromkeys(str(run.beside[name]) for run in seeds) for label, seeds in grouped(labelled).items()
        }
        listed = "; ".join(f"{label}: {', '.join(each)}" for label, each in values.items())
        notes.append(f"{name} of {listed}")
    return labelled, shared, notes


def _unfinished(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return a line for each run that has rounds left."""
    every = [(label, run) for label, seeds in runs.items() for run in seeds]
    left = [(label, run) for label, run in every if len(run.history) < run.training.rounds and not run.stopped]
    return [
        f"not finished: {label}, seed {run.training.seed}: {len(run.history)} of {run.training.rounds} rounds; "
        f"'fedstill resume {run.folder}' goes on"
        for label, run in left
    ]


def _facts(run: Run) -> Facts:
    """Return the facts of a run, from its folder."""
    assert run.folder is not None
    assert run.outline is not None
    record = read_json(run.folder / PARTITION, LARGEST)
    parameter = record.get("parameter")
    kind = str(record.get("kind", ""))
    data = str(read_toml(run.folder / EXPERIMENT).get("data", PYTHON))
    return Facts(
        data=run.outline.name if data == PYTHON else data,
        clients=len(run.outline.sizes),
        partition=kind if parameter is None else f"{kind}:{parameter}",
        hashes=(str(record.get("hash", "")),),
        model=run.model,
    )


def curves(runs: Mapping[str, Sequence[Run]], contract: Evaluation) -> list[str]:
    """Return a line for each method with its accuracy by round, mean over seeds, all on one scale."""
    drawn: dict[str, list[tuple[int, float]]] = {}
    for label, seeds in runs.items():
        try:
            at = [dict(contract.by_round(run.history)) for run in seeds]
        except InputError:  # a method without such a model
            continue
        common = sorted(set.intersection(*(set(each) for each in at)))
        if len(common) > 1:
            drawn[label] = [(round, float(np.mean([each[round] for each in at]))) for round in common]
    if not drawn:
        return []
    lowest, highest = (f(v for points in drawn.values() for _, v in points) for f in (min, max))
    width, last = max(map(len, drawn)), max(points[-1][0] for points in drawn.values())
    measure = contract.measure(next(iter(runs.values()))[0].history)
    ends = f"{BARS[0]} {measure.text(lowest, 1)}, {BARS[-1]} {measure.text(highest, 1)}"
    if measure.share:
        ends = f"{BARS[0]} {100 * lowest:.1f} %, {BARS[-1]} {100 * highest:.1f} %"
    lines = [f"by round, to {last}: {ends}"]
    for label, points in drawn.items():
        values = [value for _, value in points]
        chosen = [values[round(i)] for i in np.linspace(0, len(values) - 1, min(WIDTH, len(values)))]
        steps = [round((v - lowest) / max(highest - lowest, 1e-12) * (len(BARS) - 1)) for v in chosen]
        lines.append(f"{label:<{width}}  {''.join(BARS[step] for step in steps)}  {measure.text(values[-1])}")
    return lines


def clients(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return a table with a row for each client: its samples, and its accuracy by method, mean over seeds.

    Where seeds divide the data differently, client k is another one in each: then it is of the first run's division alone.
    """
    first = next(iter(runs.values()))[0]
    division = _facts(first).hashes
    alike = {label: [run for run in seeds if _facts(run).hashes == division] for label, seeds in runs.items()}
    left = sum(map(len, runs.values())) - sum(map(len, alike.values()))
    runs = {label: seeds for label, seeds in alike.items() if seeds}
    records = {label: [scored(run)["personal_clients"] for run in seeds] for label, seeds in runs.items()}
    numbers = sorted({int(k) for each in records.values() for record in each for k in record})
    outline = first.outline
    train = scored(first).get("train_samples", {})
    tests = scored(first)["samples"]

    def cell(each: Sequence[Mapping[str, float]], k: int) -> str:
        values = [record[str(k)] for record in each if str(k) in record]
        return measure.text(float(np.mean(values))) if values else "–"

    named, measure = outline is not None and bool(outline.names), measure_of("", scored(first))
    cells = [
        ("client", [str(k) for k in numbers]),
        *([("name", [outline.client(k) for k in numbers])] if named and outline is not None else []),
        ("train", [str(train.get(str(k), "–")) for k in numbers]),
        ("test", [str(tests.get(str(k), "–")) for k in numbers]),
        *((measure.heading(label), [cell(each, k) for k in numbers]) for label, each in records.items()),
    ]
    others = f"runs on other divisions of the data, whose clients are others, are left out here: {left}"
    return [*aligned(cells), *(["", f"clients of seed {first.training.seed}; {others}"] if left else [])]
