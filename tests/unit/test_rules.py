"""The server's rules: steps worked out in numpy, the mean to the bit, resuming, and which methods take one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.cli import main
from fedstill.server.optimizer import Rule

from ..problems import Spy, cut_and_resumed, identical, make, run, states

RULES = ("momentum", "adam", "yogi")
SIZES = (13, 7, 1, 10, 5)


@dataclass
class ByHand:
    """A rule on one array, as Hsu et al. and Reddi et al. print it."""

    kind: str
    lr: float
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3
    m: np.ndarray | float = 0.0
    v: np.ndarray | float | None = None

    def step(self, w: np.ndarray, mean: np.ndarray) -> np.ndarray:
        delta = mean - w
        if self.kind == "momentum":
            self.m = self.b1 * self.m + delta
            return w + self.lr * self.m
        v = self.tau**2 if self.v is None else self.v
        self.m = self.b1 * self.m + (1 - self.b1) * delta
        if self.kind == "adam":
            self.v = self.b2 * v + (1 - self.b2) * delta**2
        else:
            self.v = v - (1 - self.b2) * delta**2 * np.sign(v - delta**2)
        return w + self.lr * self.m / (np.sqrt(self.v) + self.tau)


def test_one_step_of_each_by_hand() -> None:
    """w = 1, mean = 3, so Δ = 2: every number on paper."""
    w, mean = {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}

    def after(kind: str, steps: int = 1, **numbers: float) -> float:
        rule = Rule(kind, **numbers)
        state, at = rule.start(w), w
        for _ in range(steps):
            at, state = rule.step(at, mean, state)
        return float(at["w"])

    assert after("momentum", lr=0.5, momentum=0.5) == 2.0
    assert after("momentum", 2, lr=0.5, momentum=0.5) == 3.0  # m = 0.5·2 + 1 = 2
    # adam: m = 0.1·2 = 0.2, v = 0.75·0.25 + 0.25·4 = 1.1875
    assert after("adam", lr=1.0, momentum=0.9, beta2=0.75, tau=0.5) == pytest.approx(1 + 0.2 / (1.1875**0.5 + 0.5))
    # yogi: v = 0.25 − 0.25·4·sign(0.25 − 4) = 1.25
    assert after("yogi", lr=1.0, momentum=0.9, beta2=0.75, tau=0.5) == pytest.approx(1 + 0.2 / (1.25**0.5 + 0.5))


@pytest.mark.parametrize("method", [fs.PFedSD(), fs.FedAvg(), fs.FedRep(), fs.FedGKD(m=2)], ids=lambda m: m.id)
@pytest.mark.parametrize("kind", RULES)
def test_three_rounds_by_hand(kind: str, method: fs.Method) -> None:
    """From the uploads alone. BatchNorm's statistics and whole numbers take the plain mean; what stays private stays."""
    numbers = {"server_lr": 0.3, "server_momentum": 0.7, "server_beta2": 0.8, "server_tau": 0.02}
    spy = Spy()
    ended = run(method, "normed", server=kind, transport=spy.transport, **numbers)
    start = make("normed")
    parameters = {name for name, _ in start.named_parameters()}
    w = {name: value.double().numpy().copy() for name, value in start.state_dict().items()}
    rules = {name: ByHand(kind, 0.3, 0.7, 0.8, 0.02) for name in parameters}
    for t in (1, 2, 3):
        replies = [reply for reply in spy.trained() if reply.round == t]
        weights = np.array([SIZES[r.client] if method.mean == "weighted" else 1.0 for r in replies])
        weights = weights / weights.sum()
        for name in replies[0].up["params"]:
            ups = [reply.up["params"][name].double().numpy() for reply in replies]
            mean = sum(p * up for p, up in zip(weights, ups, strict=True))
            if name in parameters:
                w[name] = rules[name].step(w[name], mean)
            else:
                w[name] = np.round(mean) if name.endswith("num_batches_tracked") else mean
    for name, value in ended.generic().items():
        assert np.allclose(value.numpy(), w[name], atol=1e-11), name


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_momentum_zero_is_the_mean_to_the_bit(engine: str) -> None:
    for method in (fs.FedAvg(), fs.PFedSD(), fs.FedBN()):
        plain = run(method, "normed", engine=engine)
        ruled = run(method, "normed", engine=engine, server="momentum", server_momentum=0.0, server_lr=1.0)
        assert identical(states(plain), states(ruled))


def test_fedavgm_is_fedavg_with_the_rule() -> None:
    ours = run(fs.FedAvgM(beta=0.7), "normed")
    theirs = run(fs.FedAvg(), "normed", server="momentum", server_momentum=0.7)
    assert identical(states(ours), states(theirs))
    assert not identical(states(ours), states(run(fs.FedAvg(), "normed")))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("method", [fs.PFedSD(stateless=True), fs.FedPer(), fs.FedGKD()], ids=lambda m: m.id)
def test_a_run_with_a_rule_goes_on_to_the_same_bits(kind: str, method: fs.Method, tmp_path: Path) -> None:
    settings = dict(rounds=5, epochs=1, clients=5, partition="iid", checkpoint_every=2, eval_every=5, batch_size=32)
    experiment = fs.Experiment(method=method, server=kind, participation=0.6, **settings)
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=3)
    assert identical(states(whole), states(resumed))


def test_which_methods_take_a_rule() -> None:
    own = {"local", "scaffold", "feddyn", "fedavgm", "pfedme", "pfedkd-wcl", "cd2-pfed"}
    for name in sorted(own):
        with pytest.raises(fs.InputError, match=f"server = 'adam': should be 'mean' for {name}: .*no plain mean"):
            run(fs.METHODS[name](), server="adam")
    for name in (
        "fedavg",
        "fedprox",
        "fedrep",
        "pfedsd",
        "fedbsd",
        "spectral",
        "ditto",
        "fedrod",
        "fedbabu",
        "lg-fedavg",
    ):
        assert fs.METHODS[name].averages, name


def test_a_method_that_brings_its_own_merge_must_say_that_it_averages() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(fs.FedAvg):
        def merge(self, task, server, uploads):
            return server

    @dataclass(frozen=True, kw_only=True)
    class Inherits(fs.FedAvg):
        pass

    assert not Silent.averages
    assert Inherits.averages


def test_on_the_command_line(tmp_path: Path, capsys) -> None:
    tiny = ["--rounds", "2", "--epochs", "1", "--clients", "4", "--partition", "iid"]
    assert main(["run", "pfedsd", "--server", "momentum", *tiny]) == 0
    assert "server momentum, η 1, β₁ 0.9: pfedsd" in " ".join(capsys.readouterr().out.split())
    assert main(["run", "scaffold", "--server", "momentum", *tiny]) == 2
    assert "--server = 'momentum': should be 'mean' for scaffold" in capsys.readouterr().err
    assert main(["run", "pfedkd-wcl", "--server", "average", *tiny]) == 0
    assert "server average" not in capsys.readouterr().out
    assert main(["run", "fedavg", "--server-lr", "0.5", *tiny]) == 0
    assert "--server-lr has no effect without --server" in capsys.readouterr().out


def test_a_rules_state_never_travels() -> None:
    """Whatever a method sends, the server's own momentum stays at the server."""
    plain = run(fs.FedGen(), rounds=2)
    ruled = run(fs.FedGen(), rounds=2, server="adam")
    assert [r["bytes_down"] for r in plain.history] == [r["bytes_down"] for r in ruled.history]
