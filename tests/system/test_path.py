"""What one round executes: few files, the same for one run and for several, and as docs/architecture.md shows them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MOST = 23


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("path_benchmark", ROOT / "benchmarks" / "path.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PATH = load()


def files(calls: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(file for file, _ in calls))


@pytest.mark.skipif(sys.gettrace() is not None, reason="coverage or a debugger traces, too")
@pytest.mark.parametrize("case", PATH.CASES)
def test_a_round_runs_through_few_files_which_the_documents_show(case: str) -> None:
    executed = files(PATH.traced(PATH.experiment(case), 1))
    assert len(executed) <= MOST
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"{re.escape(case)}:\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert re.findall(r"\S+\.py", listed) == executed


def test_three_seeds_side_by_side_run_through_the_same_functions_in_the_same_order() -> None:
    case = PATH.experiment("fedstill run pfedsd")
    assert PATH.traced(case, 3) == PATH.traced(case, 1)
