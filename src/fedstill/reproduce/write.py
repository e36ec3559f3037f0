"""The files of a reproduced exhibit: results.json (complete), table.md, and of a figure figure.png, figure.svg and figure.csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core import files, settings
from ..core.version import __version__
from ..papers import Exhibit
from ..run.experiment import Experiment
from .layout import markdown
from .plan import Plan
from .reading import Reading, rankings
from .scale import Scale
from .score import mean_curve
from .store import today

RESULTS, TABLE, CSV = "results.json", "table.md", "figure.csv"
FORMAT = 1


def folder_of(out: Path, exhibit: Exhibit, scale: Scale) -> Path:
    """Return the folder of an exhibit's files."""
    return out / exhibit.paper / (exhibit.id if scale.whole else f"{exhibit.id}-scale-{scale.share:g}")


def write(out: Path, exhibit: Exhibit, readings: Sequence[Reading], plan: Plan, command: str) -> list[Path]:
    """Write an exhibit's files; return where they are."""
    folder = folder_of(out, exhibit, plan.scale)
    made = [folder / RESULTS, folder / TABLE]
    record = record_of(exhibit, readings, plan, command)
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    files.write(made[0], (text + "\n").encode())
    files.write(made[1], markdown(exhibit, readings, plan.scale).encode())
    if exhibit.kind == "figure":
        made.append(folder / CSV)
        files.write(made[-1], table_of(readings, plan.scale).encode())
    return made


def record_of(exhibit: Exhibit, readings: Sequence[Reading], plan: Plan, command: str) -> dict[str, Any]:
    """Return all that is known of an exhibit's cells as plain values."""
    return {
        "format": FORMAT,
        "exhibit": exhibit.name,
        "title": exhibit.title,
        "where": exhibit.where,
        "kind": exhibit.kind,
        "form": exhibit.form,
        "published_seeds": exhibit.seeds,
        "published_spread": exhibit.spread,
        "unstated": list(exhibit.unstated),
        "command": command,
        "date": today(),
        "fedstill": __version__,
        "scale": plan.scale.share,
        "scaled": "" if plan.scale.whole else plan.scale.words(),
        "cells": [_cell(reading, plan) for reading in readings],
        "rankings": ranking_records(exhibit, readings),
    }


def ranking_records(exhibit: Exhibit, readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """Return an exhibit's rankings as plain values."""
    return [
        {
            "where": r.where,
            "tau": r.tau,
            "pairs": r.pairs,
            "holds": r.holds,
            "state": r.state,
            "swaps": [asdict(s) for s in r.swaps],
        }
        for r in rankings(exhibit, list(readings))
    ]


def _cell(reading: Reading, plan: Plan) -> dict[str, Any]:
    cell, ours, verdict = reading.cell, reading.ours, reading.verdict
    trial = plan.trial(cell)
    contract = {name: value for name, value in vars(cell.contract).items() if name != "reference"}
    return {
        "id": cell.id,
        "setting": cell.setting,
        "method": cell.method,
        "label": cell.label,
        "row": cell.row,
        "column": cell.column,
        "panel": cell.panel,
        "x": cell.x,
        "contract": {**contract, "reference": dict(cell.contract.reference), "unit": cell.contract.unit},
        "published": cell.published,
        "published_spread": cell.spread,
        "relation": cell.relation,
        "state": reading.state,
        "problem": reading.problem,
        "seeds": reading.seeds,
        "values": list(reading.values),
        "mean": None if ours is None else ours.mean,
        "std": None if ours is None else ours.std,
        "difference": None if verdict is None else verdict.difference,
        "verdict": None if verdict is None else verdict.kind,
        "noise": None if verdict is None else verdict.bound,
        "curve": [list(point) for point in mean_curve(reading.curves)] if reading.curves else None,
        "distribution": list(reading.distribution) or None,
        "counts": None if reading.counts is None else reading.counts.tolist(),
        "settings": None if trial is None else _settings(trial.experiment),
        "runs": [result.provenance() for result in reading.results],
    }


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings of an experiment that are not defaults, and its method with all fields."""
    own = {f.name: getattr(experiment, f.name) for f in settings.fields_of(Experiment)}
    given = {f.name: own[f.name] for f in settings.fields_of(Experiment) if own[f.name] != f.default}
    given.pop("data_root", None)
    method = {"id": experiment.method.id, **settings.values_of(experiment.method)}
    return json.loads(json.dumps({**given, "method": method}))  # type: ignore[no-any-return]


def table_of(readings: Sequence[Reading], scale: Scale) -> str:
    """Return a figure's points as CSV: one line each, with the scale of ours."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["panel", "row", "column", "label", "x", "mean", "std", "seeds", "published", "scale"])
    for reading in readings:
        cell = reading.cell
        place = [cell.panel, cell.row, cell.column, cell.label]
        if reading.counts is not None:
            for client, row in enumerate(reading.counts):
                for label, count in enumerate(row):
                    writer.writerow([*place, f"client {client} class {label}", int(count), "", 1, "", scale.share])
        elif reading.distribution:
            for value in reading.distribution:
                writer.writerow([*place, "client", repr(value), "", reading.seeds, "", scale.share])
        elif reading.curves:
            for x, mean, std in mean_curve(reading.curves):
                writer.writerow(
                    [*place, x, repr(mean), "" if std is None else repr(std), len(reading.curves), "", scale.share]
                )
        else:
            ours = reading.ours
            spread = "" if ours is None or ours.std is None else repr(ours.std)
            numbers = ["", "", 0] if ours is None else [repr(ours.mean), spread, ours.seeds]
            at, printed = ("" if value is None else value for value in (cell.x, cell.published))
            writer.writerow([*place, at, *numbers, printed, scale.share])
    return out.getvalue()
