"""The short form of benchmarks/soak_files.py: mutated data files, mutated experiments, bombs in limited memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "soak_files.py"
pytest.importorskip("PIL")
if not (sys.platform == "linux" and FILE.is_file()):
    pytest.skip("reads /proc, and needs the folder benchmarks", allow_module_level=True)


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_files", FILE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["soak_files"] = loaded
    spec.loader.exec_module(loaded)
    return loaded


SOAK = module()


@pytest.mark.parametrize("name", SOAK.SECTIONS)
def test_the_short_form_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    rows = SOAK.SECTIONS[name](True)
    assert rows
    assert all(len(row) == 3 and all(row) for row in rows)
