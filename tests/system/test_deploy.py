"""A hub and sites as real processes with real certificates on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstill as fs
from fedstill.core import reading, tree
from fedstill.core.errors import InputError
from fedstill.data import Federation
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal
from fedstill.run.prepare import federation_of

if importlib.util.find_spec("nvflare") is None:
    if os.environ.get("FEDSTILL_NO_SKIP"):
        raise ImportError("the extra deploy is not installed: pip install 'fedstill[deploy]'")
    pytest.skip("the extra deploy (nvflare) is not installed", allow_module_level=True)

from fedstill.deploy import demo, jobs, keeper, process
from fedstill.deploy.flare import pack, unpack
from fedstill.deploy.folders import Hub, Site
from fedstill.deploy.process import Settings

NAMES = ("a", "b", "c")
HELD: dict[str, Any] = {"rounds": 3, "dtype": "float64", "lr": 0.05, "momentum": 0.9, "device": "cpu", "engine": "one"}


def write_silos(folder: Path) -> Path:
    """Write three clients of different sizes and classes, one file each."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 6))
    for k in range(3):
        y = rng.integers(0, 4, 40 + 9 * k)
        x = (centres[y] * (1 + k) + rng.normal(size=(len(y), 6))).astype(np.float32)
        np.savez(folder / f"{k}.npz", x=x, y=y)
    return folder


def data(folder: Path) -> Federation:
    """The clients of a folder, divided into training and test samples as a simulation of it does."""
    return federation_of(Experiment(method=METHODS["fedavg"](), data=str(write_silos(folder))))


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_silos(tmp_path_factory.mktemp("silos"))


@pytest.fixture(scope="module")
def federation(silos: Path) -> Federation:
    return data(silos)


@pytest.fixture(scope="module")
def party(federation: Federation) -> Iterator[demo.Party]:
    with demo.party(federation, NAMES) as made:
        yield made


def run(party: demo.Party, method: str, **changed: Any) -> tuple[Path, list[dict[str, Any]]]:
    job = {name: changed.pop(name) for name in ("deadline", "wait", "name") if name in changed}
    experiment = Experiment(method=METHODS[method](), **{**HELD, **changed})
    folder = jobs.submit(party.hub, experiment, NAMES, **job)
    return folder, list(jobs.follow(folder, lambda: bool(process.running(party.hub.folder))))


def models(party: demo.Party, job: Path) -> list[dict[str, torch.Tensor]]:
    """Each site's own model, as it keeps it."""
    about = json.loads((job / "run" / "deployment.json").read_text())
    return [load_file(party.site(name) / "runs" / about["run"] / "personal.safetensors") for name in NAMES]


def server(job: Path) -> dict[str, torch.Tensor]:
    """What the hub kept of its server's state."""
    checkpoint = Journal(job / "run").load(torch.device("cpu"))
    assert checkpoint is not None
    return dict(tree.leaves(checkpoint.state()["server"]))


FOUR = ("pfedsd", "scaffold", "fedrep", "spectral")


@pytest.fixture(scope="module")
def elsewhere(silos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same experiments in one process and on two ranks of a cluster: the models of both, as files."""
    out = tmp_path_factory.mktemp("elsewhere")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [str(Path(__file__).with_name("three_ways.py")), str(out), str(silos), *FOUR]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fs.__file__).parents[1])}
    done = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("method", FOUR)
def test_one_process_two_ranks_and_three_sites_have_the_same_numbers(
    method: str, dtype: str, party: demo.Party, elsewhere: Path
) -> None:
    job, history = run(party, method, dtype=dtype)
    assert [(record["participants"], record["missing"]) for record in history] == [([0, 1, 2], [])] * 3
    merged = server(job)
    ours = {f"personal-{k}/{entry}": leaf for k, kept in enumerate(models(party, job)) for entry, leaf in kept.items()}
    ours |= {
        f"generic/{entry.removeprefix('params|')}": leaf for entry, leaf in merged.items() if entry[:7] == "params|"
    }
    least = 1e-10 if dtype == "float64" else 1e-4
    for way in ("local", "cluster"):
        theirs = load_file(elsewhere / f"{method}-{dtype}-{way}.safetensors")
        assert sum(name.startswith("personal-2/") for name in theirs) == 4
        assert any(name.startswith("generic/") for name in theirs) == (method != "fedrep")
        for name, leaf in theirs.items():
            assert leaf.dtype == getattr(torch, dtype)
            torch.testing.assert_close(ours[name], leaf, rtol=0, atol=least)


def test_stateless_sites_keep_no_model(party: demo.Party, federation: Federation) -> None:
    method = fs.PFedSD(stateless=True)
    one = fs.run(Experiment(method=method, **HELD), federation=federation)
    job = jobs.submit(party.hub, Experiment(method=method, **HELD), NAMES)
    history = list(jobs.follow(job, lambda: True))
    merged = server(job)
    for entry, leaf in tree.leaves(one.server):  # every v_k among them
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    assert [r["personal_clients"] for r in history] == [r["personal_clients"] for r in one.history]


# ---- kills -----------------------------------------------------------------------------------------------------------
SLOW: dict[str, Any] = {"rounds": 4, "epochs": 60}  # a round of a good half second


def kill(folder: Path) -> None:
    """End the process of a hub or site at once; its keeper starts another."""
    os.kill(int((folder / keeper.PROCESS).read_text()), signal.SIGKILL)


def disturbed(
    party: demo.Party, method: str, at: dict[int, tuple[str, float]], **changed: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """Run, and some time after a round is over kill somebody, once each."""
    experiment = Experiment(method=METHODS[method](), **{**HELD, **SLOW, **changed})
    job, history = jobs.submit(party.hub, experiment, NAMES), []
    for record in jobs.follow(job, lambda: bool(process.running(party.hub.folder))):
        history.append(record)
        who, delay = at.pop(record["round"], ("", 0.0))
        if who:
            time.sleep(delay)
            kill(party.folder / who)
    assert not at
    return job, history


def test_killed_hubs_and_sites_come_to_the_same_bits(party: demo.Party) -> None:
    job, history = run(party, "scaffold", **SLOW)
    again, _ = disturbed(party, "scaffold", {1: ("hub", 0.3), 2: ("a", 0.1)})
    before, after = server(job), server(again)
    assert all(torch.equal(before[entry], after[entry]) for entry in before)
    for one, two in zip(models(party, job), models(party, again), strict=True):
        assert all(torch.equal(one[entry], two[entry]) for entry in one)
    final = list(jobs.follow(again, lambda: True))
    assert [record["round"] for record in final] == list(range(1, 5))
    for a, b in zip(history, final, strict=True):
        assert (a["participants"], a["steps"], a["personal_clients"]) == (
            b["participants"],
            b["steps"],
            b["personal_clients"],
        )


def test_a_site_that_hangs_is_missed_at_the_deadline_and_counts_again_later(party: demo.Party) -> None:
    experiment = Experiment(method=METHODS["pfedsd"](), **{**HELD, "rounds": 6, "epochs": 40})
    job, missing, stopped = jobs.submit(party.hub, experiment, NAMES, deadline=5.0), [], 0
    for record in jobs.follow(job, lambda: True):
        missing.append(record["missing"])
        assert record["seconds"] < 3 * 5 + 5  # training, scores, state
        if record["round"] == 1:
            stopped = int((party.site("b") / keeper.PROCESS).read_text())
            os.kill(stopped, signal.SIGSTOP)
        elif stopped and missing[-1] == [1]:
            os.kill(stopped, signal.SIGCONT)
            stopped = 0
    assert [1] in missing
    assert missing[-1] == []


def at_work(number: int) -> bool:
    """Whether a process is there, and not only waits to be forgotten."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_whole_site_that_is_killed_comes_back_with_its_model(party: demo.Party) -> None:
    job, _ = run(party, "pfedsd")
    kept = models(party, job)[0]
    keeper_of, worker = process.running(party.site("a")), int((party.site("a") / keeper.PROCESS).read_text())
    os.kill(keeper_of, signal.SIGKILL)
    party.keepers["a"].wait(10)
    end = time.monotonic() + 10
    while at_work(worker) and time.monotonic() < end:  # it ends with its keeper
        time.sleep(0.05)
    assert not at_work(worker)
    assert not process.running(party.site("a"))
    party.start("a")
    party.wait("a")
    assert all(torch.equal(kept[name], leaf) for name, leaf in models(party, job)[0].items())
    _, history = run(party, "pfedsd", rounds=1)
    assert history[0]["participants"] == [0, 1, 2]


# ---- who is not let in -------------------------------------------------------------------------------------------------
def imposter(party: demo.Party, folder: Path, approved_by: Hub, name: str, claims: str) -> Path:
    """A site with a certificate of some hub for `name`, which knocks at the party's hub as `claims`."""
    asked = Site.request(folder, name)
    kit = {**approved_by.approve(json.dumps(asked), name), "hub": party.hub.name, "port": party.hub.port}
    Site.at(folder).join(json.dumps(kit), name)
    about = json.loads((folder / "site.json").read_text())
    (folder / "site.json").write_text(json.dumps({**about, "name": claims}))
    Settings(str(party.folder / "a.npz"), device="cpu").write(folder)
    return folder


def log_of(folder: Path) -> str:
    return (folder / keeper.LOG).read_text(errors="replace")


def test_strangers_and_imposters_are_kept_out_and_the_run_is_unaffected(party: demo.Party, tmp_path: Path) -> None:
    other = Hub.init(tmp_path / "other", "demo-hub", "127.0.0.1", party.hub.port)
    folders = {
        "another root": imposter(party, tmp_path / "x", other, "x", "x"),
        "the name of a": imposter(party, tmp_path / "y", party.hub, "d", "a"),
        "no approval": imposter(party, tmp_path / "z", party.hub, "z", "z"),
    }
    for name in ("d", "z"):
        (party.hub.folder / "sites" / f"{name}.crt").unlink()
    keepers = {why: process.launch("site", folder, threads=1) for why, folder in folders.items()}
    try:
        _, before = run(party, "pfedsd", epochs=40, rounds=8)
        signs = {  # in the logs
            "another root": lambda: "CERTIFICATE_VERIFY_FAILED" in log_of(folders["another root"]),
            "the name of a": lambda: "authenticated as 'd' but claimed endpoint 'a'" in log_of(party.hub.folder),
            "no approval": lambda: keepers["no approval"].poll() == keeper.REFUSED,
        }
        end = time.monotonic() + 40
        while time.monotonic() < end and not all(sign() for sign in signs.values()):
            time.sleep(0.5)
        seen = {why: bool(sign()) for why, sign in signs.items()}
        assert all(seen.values()), (seen, log_of(party.hub.folder)[-4000:])
        let_in = [why for why, folder in folders.items() if (folder / process.UP).exists()]
        assert not let_in, [log_of(folders[why])[-3000:] for why in let_in]
    finally:
        for folder in folders.values():
            process.stop(folder)
    assert all(record["participants"] == [0, 1, 2] for record in before)
    _, after = run(party, "pfedsd", epochs=40, rounds=8)
    assert [record["personal_clients"] for record in before] == [record["personal_clients"] for record in after]


@pytest.mark.parametrize(
    "data", [b"", bytes(7), b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"nope", None, {}]
)
def test_bytes_that_are_no_message_are_named(data: object) -> None:
    with pytest.raises(reading.Unreadable):
        unpack(data)
    assert unpack(pack({"do": "ask"}, b"body")) == ({"do": "ask"}, b"body")


def test_a_revoked_site_is_refused_and_the_others_go_on(party: demo.Party) -> None:
    party.hub.revoke("c")
    party.keepers["c"].wait(30)
    assert "does not let c take part" in process.tail(party.site("c"))
    experiment = Experiment(method=METHODS["pfedsd"](), **HELD)
    history = list(jobs.follow(jobs.submit(party.hub, experiment, NAMES[:2]), lambda: True))
    assert [record["participants"] for record in history] == [[0, 1]] * 3
    with pytest.raises(InputError, match="sites = 'c'"):
        jobs.submit(party.hub, experiment, NAMES)
