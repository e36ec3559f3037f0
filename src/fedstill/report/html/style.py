"""Which methods are drawn in colour: the best, the ones to compare with, and those asked for; the rest is grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .read import Study
from .svg import COLOURS

MOST = 7  # methods in colour
BASELINES = ("local", "fedavg")
BEST = 4
Styles = Mapping[str, str]  # the class of every label, "sx" for grey


def styles(study: Study, asked: Sequence[str] = ()) -> dict[str, str]:
    """Return the class of every label."""
    labels = study.labels
    if len(labels) <= MOST:
        chosen = labels
    else:
        baselines = [label for label in labels if study.runs[label][0].method in BASELINES]
        wanted = [*(label for label in asked if label in labels), *labels[:BEST], *baselines[: len(BASELINES)]]
        chosen = list(dict.fromkeys(wanted))[:MOST]
    return {label: f"s{chosen.index(label) % COLOURS}" if label in chosen else "sx" for label in labels}


def coloured(classes: Styles) -> list[str]:
    """Return the labels in colour."""
    return [label for label, cls in classes.items() if cls != "sx"]
