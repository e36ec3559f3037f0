"""The built wheel in an empty environment, and the core where only torch and numpy are."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_runs_the_demo_in_an_empty_environment(tmp_path: Path) -> None:
    """An environment that has the wheel and, by a path file, the packages it depends on; the sources are not on its path."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("fedstill-*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run(*pip, "--target", packages, wheel)
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = run(python, "-m", "fedstill", "demo", "--rounds", "2", cwd=tmp_path, env=environment)
    assert all(name in shown for name in ("local", "fedavg", "fedrep", "pfedsd"))
    assert (tmp_path / "fedstill-demo" / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "fedstill-demo" / "report.html").stat().st_size > 50_000
    where = run(python, "-c", "import fedstill; print(fedstill.__file__)", cwd=tmp_path, env=environment)
    assert str(tmp_path) in where
    needs = {requirement.partition(">")[0] for requirement in metadata.distribution("fedstill").requires or ()}
    assert {"torch", "numpy", "safetensors"} <= needs


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
