"""The short forms of `benchmarks/soak_workers.py`: workers killed and stopped, memory, other numbers of threads."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked, on Linux alone")


@pytest.mark.parametrize("section", ["workers", "leaks", "threads"])
def test_the_damage_is_mended(section: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    soak = importlib.import_module("soak_workers")
    assert soak.SECTIONS[section](short=True)
