"""Importing the library and asking the command for help load no PyTorch, and whatever is imported first gives the same names."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys

import pytest

import fedstill as fs
from fedstill import api
from fedstill.cli import COMMANDS

HEAVY = ("torch", "numpy", "rich", "matplotlib", "fedstill.api", "fedstill.methods")


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def imported(said: str) -> set[str]:
    """The modules of a report of `-X importtime`."""
    return {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    "words",
    [("-c", "import fedstill"), ("-m", "fedstill", "--help"), ("-m", "fedstill", "--version"), ("-m", "fedstill", "bogus")],
    ids=str,
)  # fmt: skip
def test_nothing_heavy_is_imported(words: tuple[str, ...]) -> None:
    found = imported(python("-X", "importtime", *words).stderr)
    assert "fedstill.core.startup" in found, "the report was not read"
    assert not found & set(HEAVY)


def test_it_is_quick() -> None:
    """In processor time, which other work on the machine changes little: a fifth of what PyTorch alone takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python("-m", "fedstill", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def anew(code: str) -> bool:
    """Run code in a process in which PyTorch is imported, and nothing of ours; return whether it ended well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == "fedstill"]:
                del sys.modules[name]
            exec(code, {})  # noqa: S102 - our own, below
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


ORDERS = (
    "import fedstill as fs",
    "import fedstill.run.simulation; import fedstill as fs",
    "import fedstill.run; import fedstill as fs",
    "from fedstill.run import session; import fedstill as fs",
    "import fedstill as fs; fs.FedAvg; import fedstill.run.together",
    "import fedstill as fs; fs.run; import fedstill.run.together",
    "from fedstill import run; import fedstill as fs; assert run is fs.run",
    "from fedstill import *; import fedstill as fs; assert run is fs.run and FedAvg is fs.FedAvg",
    "import fedstill.cli.train; import fedstill as fs",
    "import fedstill.api; import fedstill as fs",
    "import importlib, fedstill as fs; importlib.import_module('fedstill.run')",
)


@pytest.mark.parametrize("order", ORDERS)
def test_run_is_the_function_whatever_comes_first(order: str) -> None:
    """And the subpackage is still there for those who import from it."""
    code = f"{order}\nimport types\nassert isinstance(fs.run, types.FunctionType), fs.run\n"
    code += "from fedstill.run import result\nimport sys\nassert sys.modules['fedstill.run'].result is result\n"
    code += "assert isinstance(fs.run, types.FunctionType)"
    assert anew(code)


def test_the_front_door_has_all_names_and_says_so() -> None:
    assert {*api.__all__, "__version__"} == set(fs.__all__) <= set(dir(fs))
    assert all(getattr(fs, name) is getattr(api, name) for name in api.__all__)
    assert fs.papers.__name__ == "fedstill.papers", "subpackages are found by attribute"
    for name in ("FedAgv", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'fedstill' has no attribute '{name}'"):
            getattr(fs, name)


def test_a_function_can_be_replaced(monkeypatch) -> None:
    monkeypatch.setattr(fs, "run", len)
    assert fs.run is len


def test_every_command_is_there() -> None:
    """Its module has the function that the table names, which is looked up when it is run."""
    for module, function in (where.split(":") for where, _ in COMMANDS.values()):
        source = os.path.join(os.path.dirname(fs.__file__), "cli", f"{module}.py")
        with open(source, encoding="utf-8") as file:
            names = {node.name for node in ast.parse(file.read()).body if isinstance(node, ast.FunctionDef)}
        assert function in names


def test_a_result_prints_its_table_without_the_front_door() -> None:
    code = (
        "from fedstill.run.simulation import run\nfrom fedstill.run.experiment import Experiment\n"
        "from fedstill.methods.fedavg import FedAvg\n"
        "assert 'personal %' in run(Experiment(method=FedAvg(), rounds=1, clients=2, epochs=1, engine='one')).table()"
    )
    assert anew(code)
