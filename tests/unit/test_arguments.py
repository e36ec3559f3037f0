"""Wrong arguments from Python: one line that names the argument, what it was and what would be right, and no folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedstill as fs
from fedstill.cli import main
from fedstill.core.errors import check_callable
from fedstill.run import legal, simulation

from ..problems import Plain, make, ragged

TINY = fs.Experiment(method=fs.FedAvg(), rounds=1, clients=4, epochs=1)


class NeedsSize(nn.Module):
    """A model whose class does not know all its sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, hidden)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Each test in a folder with a file and a folder that holds one."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full/mine.txt").write_text("notes")


def simulate(**changes) -> fs.Run:
    call = {"method": fs.FedAvg(), "model": make("plain"), "data": ragged(), "rounds": 1, "epochs": 1, **changes}
    method = call.pop("method")
    return fs.simulate(method, **call)


SIMULATE = [
    ({"progress": True}, "progress = True: should be a function"),
    ({"method": "fedavg"}, "method = 'fedavg': should be a method such as fedstill.PFedSD()"),
    ({"method": fs.FedAvg}, "method = <class 'fedstill.methods.fedavg.FedAvg'>: should be a method such as"),
    ({"data": None}, "data = NoneType: should be a fedstill.Federation"),
    (
        {"data": TensorDataset(torch.zeros(3, 2), torch.zeros(3))},
        "data = TensorDataset: should be a fedstill.Federation",
    ),
    ({"model": None}, "model = NoneType: should be an nn.Module, or a function that makes one"),
    ({"model": NeedsSize}, "model = NeedsSize: should be an nn.Module, or a function that makes one (missing"),
    ({"model": lambda: 3}, "model = int: should be an nn.Module"),
    ({"model": nn.ReLU()}, "model = ReLU: should be a module with parameters"),
    ({"head": 2}, "head = 2: should be the name of a module"),
    (
        {"head": nn.Linear(6, 3)},
        "head = Linear(in_features=6, out_features=3, bias=True): should be the name of a module",
    ),
    ({"out": 3}, "out = 3: should be a path"),
    ({"out": ""}, "out = '': should be a path"),
    ({"out": "file"}, "out = 'file': should be a folder that is new or empty"),
    ({"out": "full"}, "out = 'full': should be a folder that is new or empty"),
    ({"out": "file/in"}, "out = 'file/in': should be a folder that can be written (Not a directory)"),
    ({"out": "/proc/nothing"}, "out = '/proc/nothing': should be a folder that can be written ("),
    ({"out": 3, "resume": True}, "out = 3: should be a path"),
    ({"resume": True}, "resume = True: should be true or false, and true only with `out`"),
    ({"resume": "yes", "out": "new"}, "resume = 'yes': should be true or false"),
    ({"lr": 10**400}, "lr = inf: should be a number above 0"),
    ({"lr": 1e39}, "lr = 1e+39: should be at most 3.40282e+38 with dtype float32"),
    ({"method": fs.FedProx(mu=1e39)}, "mu = 1e+39: should be at most 3.40282e+38 with dtype float32"),
    ({"mode": np.zeros(3)}, "mode = array([0., 0., 0.]): should be one of: sync, fedasync, fedbuff"),
    ({"device": 0}, "device = 0: should be a text"),
    ({"minimum": 6}, "minimum = 6: should be at most 5, the clients that are wanted in a round"),
    ({"newcomers": 5}, "newcomers = 5: should be at most 4: one of the 5 clients must train"),
]
RUN = [
    ({"experiment": fs.FedAvg()}, "experiment = FedAvg(mean='weighted'): should be a fedstill.Experiment"),
    ({"experiment": "fedavg"}, "experiment = 'fedavg': should be a fedstill.Experiment"),
    ({"experiment": fs.Experiment}, "experiment = <class 'fedstill.run.experiment.Experiment'>: should be a"),
    ({"progress": True}, "progress = True: should be a function"),
    ({"federation": [1]}, "federation = list: should be a fedstill.Federation"),
    ({"out": "file/in"}, "out = 'file/in': should be a folder that can be written (Not a directory)"),
    ({"out": True}, "out = True: should be a path"),
]
TOGETHER = [
    ({"experiments": []}, "experiments = list: should be a list of one or more fedstill.Experiment"),
    ({"experiments": TINY}, "experiments = Experiment: should be a list of one or more fedstill.Experiment"),
    ({"experiments": [fs.FedAvg()]}, "experiment = FedAvg(mean='weighted'): should be a fedstill.Experiment"),
    ({"outs": ["a", "b"]}, "outs = list of 2: should be a list of 1, one for each experiment"),
    ({"outs": Path("a")}, "outs = PosixPath: should be a list of 1, one for each experiment"),
    ({"federations": [3]}, "federation = int: should be a fedstill.Federation"),
    ({"progress": True}, "progress = True: should be a function"),
]
OTHERS = [
    (lambda: fs.resume(3), "folder = 3: should be a path"),
    (lambda: fs.resume("nowhere"), "folder = 'nowhere': should be a run"),
    (lambda: fs.Experiment.from_toml(3), "experiment = 3: should be a path"),
    (lambda: fs.Experiment.from_toml("full"), "experiment = 'full': should be a file, not a folder"),
    (lambda: fs.Experiment.from_values("rounds"), "experiment = str: should be a mapping of names to values"),
    (lambda: fs.Experiment(method="fedavg"), "method = 'fedavg': should be a method such as fedstill.PFedSD()"),
    (lambda: fs.Experiment(method=fs.FedAvg), "method = <class 'fedstill.methods.fedavg.FedAvg'>: should be a method"),
    (
        lambda: fs.Federation.from_dataset(TensorDataset(torch.zeros(3, 2), torch.zeros(3))),
        "dataset = TensorDataset: should be a Dataset of fedstill.data.load",
    ),
    (lambda: fs.Federation.from_dataset("digits"), "dataset = str: should be a Dataset of fedstill.data.load"),
]


def refused(call, says: str) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(fs.InputError) as error:
        call()
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("changes", "says"), SIMULATE, ids=[says[:40] for _, says in SIMULATE])
def test_simulate(changes, says) -> None:
    refused(lambda: simulate(**changes), says)


@pytest.mark.parametrize(("changes", "says"), RUN, ids=[says[:40] for _, says in RUN])
def test_run(changes, says) -> None:
    call = {"experiment": TINY, **changes}
    refused(lambda: fs.run(call.pop("experiment"), **call), says)


@pytest.mark.parametrize(("changes", "says"), TOGETHER, ids=[says[:40] for _, says in TOGETHER])
def test_run_together(changes, says) -> None:
    call = {"experiments": [TINY], **changes}
    refused(lambda: fs.run_together(call.pop("experiments"), **call), says)


@pytest.mark.parametrize(("call", "says"), OTHERS, ids=[says[:40] for _, says in OTHERS])
def test_others(call, says) -> None:
    refused(call, says)


def test_what_is_right_passes() -> None:
    check_callable("progress", None)
    check_callable("progress", print)
    legal.check_model(Plain)
    legal.check_model(make("plain"))
    legal.check_out("new/deep")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("method", "training", "says"),
    [
        (fs.FedAvg(), {"minimum": 6}, "minimum = 6: should be at most 5"),
        (fs.FedAvg(), {"minimum": 4, "participation": 0.6}, "minimum = 4: should be at most 3"),
        (fs.SCAFFOLD(), {"server": "adam"}, "server = 'adam': should be 'mean' for scaffold"),
        (fs.SCAFFOLD(), {"profile": "uniform", "mode": "fedasync"}, "mode = 'fedasync': should be 'sync' for scaffold"),
        (
            fs.FedAvg(),
            {"profile": "uniform", "mode": "fedbuff", "buffer": 6},
            "buffer = 6: should be at most 5, the clients at work at a time",
        ),
        (fs.FedAvg(), {"profile": "uniform", "wait_free": "fixed"}, "wait_free = 'fixed': should be 'off' for fedavg"),
        (
            fs.Ditto(),
            {"profile": "uniform", "wait_free": "until-download", "forgetting": True},
            "forgetting = True: should be false with wait_free 'until-download'",
        ),
    ],
)
def test_settings_that_the_method_or_the_clients_do_not_allow(method, training, says) -> None:
    task = simulation.prepare(method, make("plain"), ragged(), None, fs.Training(rounds=2)).trainer.bench.task
    refused(lambda: legal.check(method, task, fs.Training(**training)), says)


def test_newcomers_leave_one_client_that_trains() -> None:
    task = simulation.prepare(fs.FedAvg(), make("plain"), ragged(), None, fs.Training()).trainer.bench.task
    legal.check(fs.FedAvg(), replace(task, clients=1), fs.Training(newcomers=4))
    says = "newcomers = 5: should be at most 4: one of the 5 clients must train"
    refused(lambda: legal.check(fs.FedAvg(), replace(task, clients=0), fs.Training(newcomers=5)), says)


def test_a_head_that_is_to_be_tuned_must_be_known() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    refused(lambda: simulate(model=model, fine_tune=1), "head = (none): should be named")


# ---- a folder of an earlier version ------------------------------------------------------------------------------------
def older(folder: Path, **changes: object) -> Path:
    """The folder of a run as version 0.0.9 might have left it."""
    file = folder / "environment.json"
    environment = json.loads(file.read_text())
    del environment["format"]
    file.write_text(json.dumps({**environment, "fedstill": "0.0.9", **changes}))
    return folder


def test_a_run_of_an_earlier_version_is_refused_with_its_version(capsys) -> None:
    fs.run(TINY, out="run")
    assert fs.resume("run").history
    older(Path("run"))
    says = (
        "folder = 'run': should be a run in format 3: fedstill 0.0.9 wrote this one in format 1; "
        "'fedstill run run/experiment.toml' runs it again"
    )
    refused(lambda: fs.resume("run"), says)
    assert main(["resume", "run"]) == 2
    assert capsys.readouterr().err == f"fedstill: {says}\n"
    assert main(["run", "run/experiment.toml", "--out", "again"]) == 0


def test_the_same_call_of_simulate_does_not_go_on_with_an_earlier_version() -> None:
    simulate(out="run")
    assert simulate(out="run", resume=True).history
    older(Path("run"), format=1)
    refused(
        lambda: simulate(out="run", resume=True), "folder = 'run': should be a run in format 3: fedstill 0.0.9 wrote"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", None])
def test_a_folder_without_a_version_is_refused(text) -> None:
    fs.run(TINY, out="run")
    file = Path("run/environment.json")
    file.unlink() if text is None else file.write_text(text)
    refused(
        lambda: fs.resume("run"), "folder = 'run': should be a run in format 3: fedstill of an unknown version wrote"
    )
