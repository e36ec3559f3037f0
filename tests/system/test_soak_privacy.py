"""The short form of benchmarks/soak_privacy.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("soak_privacy")


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("section", ["epsilon", "clipping", "leakage"])
def test_a_section_keeps_its_promise(soak: ModuleType, section: str) -> None:
    rows = soak.SECTIONS[section](True)
    assert rows
    assert all(len(row) == 3 for row in rows)
