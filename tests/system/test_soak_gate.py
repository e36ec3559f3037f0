"""The short form of benchmarks/soak_gate.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("section", ["uploads", "wire", "overhead"])
def test_the_short_form(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    rows = importlib.import_module("soak_gate").SECTIONS[section](True)
    assert rows
    assert all(len(row) == 3 for row in rows)
