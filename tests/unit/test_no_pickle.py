"""Nothing in the library can run code that a file or a message brings along: ruff's rules, and what they do not know."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstill

SOURCE = Path(fedstill.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "yaml"}
MODULES |= {"pickletools", "copyreg", "code", "codeop", "runpy", "imp", "pandas", "h5py", "dbm"}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
CALLS = {
    *("torch.load", "torch.save", "torch.hub", "torch.jit.load", "torch.package", "torch.multiprocessing"),
    *("np.load", "numpy.load", "np.memmap", "np.fromfile"),
    *("dist.send_object_list", "dist.recv_object_list", "dist.broadcast_object_list", "dist.scatter_object_list"),
    *("dist.gather_object", "dist.all_gather_object"),
    *("multiprocessing.Pool", "multiprocessing.Queue", "multiprocessing.Pipe", "multiprocessing.Manager"),
    *("tarfile.TarFile.extractall", "os.system", "os.popen"),
}
METHODS = {"extractall", "read_pickle", "load_module", "exec_module"}
NAMES = {"ProcessPoolExecutor", "SyncManager", "Unpickler"}


def suspicious(tree: ast.AST) -> Iterator[str]:
    """What a module could unpickle or execute with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            level = getattr(node, "level", 0)
            yield from (f"import {name}" for name in modules if not level and name.partition(".")[0] in MODULES)
            yield from (f"import {a.name}" for a in node.names if a.name in NAMES)
            if isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in CALLS)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in CALLS or node.attr in METHODS | NAMES:
                yield name
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield f"{node.func.id}()"
            if isinstance(node.func, ast.Attribute) and node.func.attr == "recv" and not node.args:
                yield f"{ast.unparse(node)}, which unpickles; recv_bytes does not"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" or (keyword.arg == "shell" and ast.unparse(keyword.value) != "False"):
                    yield f"{keyword.arg}="


USED = {
    "core/own.py": ["spec.loader.exec_module"],  # code of one's own that a command was asked to train
    "run/result.py": ["import pandas"],  # Run.to_frame makes a frame of numbers; nothing of pandas reads a file
}


def test_no_module_unpickles_or_executes() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = {str(f.relative_to(SOURCE)): [*suspicious(ast.parse(f.read_text(encoding="utf-8")))] for f in files}
    assert len(files) > 100
    assert {file: ways for file, ways in found.items() if ways} == USED
    uses = ast.walk(ast.parse((SOURCE / "run/result.py").read_text(encoding="utf-8")))
    assert {ast.unparse(n) for n in uses if isinstance(n, ast.Attribute) and ast.unparse(n).startswith("pandas.")} == {
        "pandas.DataFrame"
    }


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "import yaml",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
        "torch.load(file)",
        "torch.load(file, weights_only=True)",
        "from torch import load",
        "np.load(file)",
        "numpy.load(file, allow_pickle=True)",
        "read(file, allow_pickle=False)",
        "pipe.recv()",
        "multiprocessing.Queue()",
        "from concurrent.futures import ProcessPoolExecutor",
        "dist.all_gather_object(all, mine)",
        "tar.extractall(folder)",
        "subprocess.run(text, shell=True)",
        "__import__(name)",
    ],
)
def test_each_way_is_noticed(line: str) -> None:
    assert list(suspicious(ast.parse(line)))


def test_ruff_keeps_its_rules() -> None:
    project = SOURCE.parents[1] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("installed from a wheel")
    lint = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert {"S102", "S202", "S301", "S302", "S307", "S506"} <= set(lint["select"])
    assert not any(rule.startswith("S") and rule[1:].isdigit() for rule in lint["ignore"])
