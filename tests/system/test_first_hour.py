"""The built wheel in an empty environment, as the quick start says, and a stranger's first hour with it, word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from .test_docs import BLOCKS, Block

ROOT = Path(__file__).parents[2]
PAGE = "docs/quick-start.md"


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outside() -> dict[str, str]:
    """The environment of a shell that knows nothing of this project, but for the versions and places that packages come from.

    pip has these from its own configuration; uv reads none, so it is told.
    """
    left = ("PYTHONPATH", "VIRTUAL_ENV", "FEDSTILL_RUNS", "FEDSTILL_DATA")
    kept = {name: value for name, value in os.environ.items() if name not in left}
    listed = run(sys.executable, "-m", "pip", "config", "list")
    settings = dict(re.findall(r"^[^.\n]*\.([\w-]+)='(.*)'$", listed, re.M))
    pins, links = str(ROOT / "constraints.txt"), kept.get("PIP_FIND_LINKS") or settings.get("find-links", "")
    uv = {"UV_CONSTRAINT": pins, **({"UV_FIND_LINKS": links} if links else {})}
    return {**kept, "PIP_CONSTRAINT": pins, "PIP_QUIET": "1", "PIP_NO_COMPILE": "1", **uv, "OMP_NUM_THREADS": "1"}


def shell(words: str, folder: Path, activated: bool = True) -> str:
    """Give a shell these lines, as a reader does; what fails ends it."""
    environment = outside()
    if "uv " in words:
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    begin = ". env/bin/activate\n" if activated else ""
    return run("bash", "-euc", f"set -o pipefail\n{begin}{words}", cwd=folder, env=environment, timeout=900)


def told() -> list[Block]:
    return [block for block in BLOCKS if block.page == PAGE]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, as somebody has built it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The same folder, after the page's first lines: an environment with what they install and nothing else."""
    first = next(block for block in told() if block.language == "sh")
    assert "pip install" in first.text
    assert "fedstill 0.1.0 (torch" in shell(first.text, wheel, activated=False)
    return wheel


def versions(folder: Path) -> dict[str, str]:
    script = "from importlib import metadata; print(*(f'{d.name}=={d.version}' for d in metadata.distributions()))"
    words = run(folder / "env" / "bin" / "python", "-c", script, env=outside()).split()
    return dict(word.split("==") for word in words)


def test_a_strangers_first_hour(installed: Path) -> None:
    """Own CSV data, a comparison, the report, an export, the model in plain PyTorch: every block of the page, in order."""
    lines = ""
    for block in told()[2:]:
        if block.note.startswith("write: "):
            (installed / block.note.removeprefix("write: ")).write_text(block.text)
        elif block.language == "sh":
            lines += shell(block.text, installed)
    for said in (
        "berlin",
        "saved in runs/first",
        "loaded again: same predictions",
        "[1.8, 0.1, -0.3] sick",
        "accuracy",
    ):
        assert said in lines, said
    report = (installed / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    assert all(word in report for word in ("berlin", "lyon", "porto", "healthy", "sick", "stay local"))
    assert (installed / "predictions.csv").read_text().count("\n") == 121
    plain = (
        "import sys, runpy; runpy.run_path('use_model.py'); "
        "assert not any(name.startswith('fedstill') for name in sys.modules), 'PyTorch alone reads it'"
    )
    run(installed / "env" / "bin" / "python", "-c", plain, cwd=installed, env=outside())


def test_the_wheel_has_what_it_needs_and_nothing_of_the_sources(installed: Path) -> None:
    there = versions(installed)
    assert {"torch", "numpy", "safetensors", "rich", "matplotlib"} <= there.keys()
    assert not there.keys() & {"pandas", "tensorboard", "nvflare", "onnx", "pytest"}
    assert there["torch"] == metadata.version("torch"), "the pinned build"
    where = run(installed / "env" / "bin" / "python", "-c", "import fedstill; print(fedstill.__file__)", env=outside())
    assert str(installed) in where
    shown = shell("fedstill demo --rounds 2", installed)
    assert all(name in shown for name in ("local", "fedavg", "fedrep", "pfedsd"))
    assert (installed / "fedstill-demo" / "figure.png").stat().st_size > 10_000
    assert (installed / "fedstill-demo" / "report.html").stat().st_size > 50_000


def test_uv_installs_the_same(wheel: Path, tmp_path: Path) -> None:
    """The page's lines for uv: the same versions, the pinned PyTorch among them, and a command that runs."""
    pytest.importorskip("uv")
    (block,) = [block for block in told() if block.note == "uv"]
    (made,) = wheel.glob("*.whl")
    (tmp_path / made.name).symlink_to(made)
    assert "fedstill 0.1.0 (torch" in shell(block.text, tmp_path, activated=False)
    there = versions(tmp_path)
    assert there["torch"] == metadata.version("torch")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in ("numpy", "safetensors", "rich", "matplotlib"):
        assert there[name] == pinned[name]


def test_the_core_needs_torch_and_numpy_alone() -> None:
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "matplotlib", "safetensors", "PIL", "tyro", "scipy", "sklearn", "pandas"}:
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refuse())
import fedstill as fs, fedstill.cli
run = fs.run(fs.Experiment(method=fs.PFedSD(), rounds=1, epochs=1))
print(run.table())
fedstill.cli.main(["run", "fedavg", "--rounds", "1"])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "pfedsd" in done.stdout
    assert "fedavg" in done.stdout
