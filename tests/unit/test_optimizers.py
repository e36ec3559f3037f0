"""Adam, AdamW, clipping and schedules against torch's; the same step for one client, for a stack, and within `vmap`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

import fedstill as fs
from fedstill.cli import main
from fedstill.core import tree
from fedstill.core.errors import InputError
from fedstill.core.optim import SGD, Adam, clipped
from fedstill.core.schedule import Schedule
from fedstill.engine.kept import KEPT
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, WIRED, cut_and_resumed, distance, finish, identical, make, ragged, run, states

SHAPES = {"a": (7, 5), "b": (3,), "c": ()}


def drawn(seed: int, *leading: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn((*leading, *shape), generator=g, dtype=torch.float64) for n, shape in SHAPES.items()}


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1e-4, 1.0),
    st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.95, 0.99)]),
    st.sampled_from([0.0, 1e-2]),
    st.sampled_from([1e-8, 1e-3]),
    st.booleans(),
    st.sampled_from([0.0, 0.7]),
    st.integers(0, 99),
)
def test_adam_and_adamw_equal_torchs_to_the_bit(lr, betas, decay, eps, decoupled, clip, seed) -> None:
    ours = drawn(seed)
    theirs = [nn.Parameter(p.clone()) for p in ours.values()]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimiser = kind(theirs, lr=lr, betas=betas, eps=eps, weight_decay=decay)
    adam = Adam(lr, *betas, eps, decay, decoupled)
    state = adam.init(ours)
    for step in range(5):
        grads = drawn(1000 + 10 * seed + step)
        for p, g in zip(theirs, grads.values(), strict=True):
            p.grad = g.clone()
        if clip:
            nn.utils.clip_grad_norm_(theirs, clip)
        optimiser.step()
        adam.update(ours, clipped(grads, clip), state)
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), theirs, strict=True))


ALL = [SGD(0.1, 0.9, True, 0.01), Adam(0.1, weight_decay=0.01), Adam(0.1, weight_decay=0.1, decoupled=True)]


@pytest.mark.parametrize("optimizer", ALL, ids=["sgd", "adam", "adamw"])
@pytest.mark.parametrize("own_rates", [False, True])
def test_a_stack_takes_each_clients_step(optimizer: Any, own_rates: bool) -> None:
    """Also with rates of their own, for a client that is not live, and for pure steps within `vmap`."""
    n, live = 3, torch.tensor([True, True, False])
    rates = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)
    start = drawn(1, n)
    stack, mapped = tree.clone(start), tree.clone(start)
    state = tree.zeros(optimizer.slots(stack))
    inner = tree.stack([optimizer.at_rest(tree.map(lambda leaf, k=k: leaf[k], start)) for k in range(n)])
    alone = [tree.map(lambda leaf, k=k: leaf[k].clone(), start) for k in range(n)]
    states_ = [optimizer.init(one) for one in alone]
    for step in range(3):
        grads = drawn(50 + step, n)
        optimizer.update(stack, tree.clone(grads), state, rates if own_rates else None, live, True)
        lr = rates if own_rates else torch.full_like(rates, optimizer.lr)
        mapped, inner = vmap(lambda w, g, s, r: optimizer.stepped(w, g, s, r))(mapped, grads, inner, lr)
        for k in range(n):
            g = tree.map(lambda leaf, k=k: leaf[k], grads)
            optimizer.update(alone[k], g, states_[k], float(lr[k]))
    for k in range(n):
        for name, value in alone[k].items():
            assert torch.allclose(mapped[name][k], value, atol=1e-13)
            assert torch.allclose(stack[name][k], value if live[k] else start[name][k], atol=1e-13)
    kept = [tree.map(lambda leaf, k=k: leaf[k], state) for k in range(n)]
    for k in range(n):
        for (_, a), (_, b) in zip(tree.leaves(kept[k]), tree.leaves(states_[k]), strict=True):
            assert torch.allclose(a, b if live[k] else torch.zeros_like(b), atol=1e-13)


def test_schedules_are_torchs_and_begin_with_a_warm_up() -> None:
    def theirs(scheduler: Any, count: int, **how: Any) -> list[float]:
        optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule, rates = scheduler(optimiser, **how), []
        for _ in range(count):
            rates.append(optimiser.param_groups[0]["lr"])
            optimiser.step()
            schedule.step()
        return rates

    cosine = theirs(torch.optim.lr_scheduler.CosineAnnealingLR, 8, T_max=8)
    assert Schedule("cosine").factors(8) == pytest.approx(cosine)
    steps = theirs(torch.optim.lr_scheduler.StepLR, 8, step_size=3, gamma=0.5)
    assert Schedule("step", every=3, decay=0.5).factors(8) == pytest.approx(steps)
    assert Schedule("cosine", warmup=4).factors(12) == pytest.approx([0.25, 0.5, 0.75, 1.0, *cosine])
    assert Schedule("step", warmup=2, every=3, decay=0.5).factors(10) == pytest.approx([0.5, 1.0, *steps])
    assert Schedule(warmup=9).factors(3) == pytest.approx([1 / 9, 2 / 9, 3 / 9])
    assert Training().recipe().schedule is None


# ---- a whole round against a loop that anybody would write ------------------------------------------------------------
OURS = {"sgd": "sgd", "adam": "adam", "adamw": "adamw"}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("over", ["rounds", "steps"])
def test_local_training_is_torchs_loop_to_the_bit(kind: str, over: str) -> None:
    """One client, full batches: two rounds of FedAvg with a schedule and clipping."""
    data = ragged(((9, 3),))
    how = {"optimizer": kind, "lr": 0.02, "clip_gradient": 0.4, "lr_schedule": "cosine", "warmup": 1}
    ours = run(
        fs.FedAvg(), "plain", data, **how, lr_schedule_over=over, batch_size=9, epochs=3, rounds=2, participation=1.0
    )
    net, (x, y) = make("plain"), (data.clients[0].x_train.double(), data.clients[0].y_train)
    base = 0.02
    for t in range(2):
        make_one = {
            "sgd": lambda p: torch.optim.SGD(p, lr=base, momentum=0.9, weight_decay=1e-3),
            "adam": lambda p: torch.optim.Adam(p, lr=base, weight_decay=1e-3),
            "adamw": lambda p: torch.optim.AdamW(p, lr=base, weight_decay=1e-3),
        }[kind]
        optimiser = make_one(net.parameters())
        for s in range(3):
            i, n = (t, 2) if over == "rounds" else (s, 3)
            factor = 1.0 if i < 1 else 0.5 * (1 + math.cos(math.pi * (i - 1) / (n - 1)))
            optimiser.param_groups[0]["lr"] = base * factor
            order = ours.trainer.bench.plan.order(t + 1, 0, 9, s)
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[order]), y[order]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.4)
            optimiser.step()
    assert all(torch.equal(ours.generic()[n], v) for n, v in net.state_dict().items())


# ---- state that is kept -----------------------------------------------------------------------------------------------
def test_kept_state_makes_rounds_one_long_training(tmp_path) -> None:
    """Alone with full batches, three rounds with kept state are three times the epochs of one round; fresh state differs."""
    data = ragged(((9, 3), (6, 2)))
    how: dict[str, Any] = {"optimizer": "adam", "lr": 0.02, "batch_size": 20, "participation": 1.0}
    long = run(fs.Local(), "plain", data, rounds=1, epochs=6, **how)
    kept = run(fs.Local(), "plain", data, rounds=3, epochs=2, keep_optimizer=True, **how)
    fresh = run(fs.Local(), "plain", data, rounds=3, epochs=2, **how)
    assert distance({"": long.personal(0)}, {"": kept.personal(0)}) < 1e-13  # batches come in another order
    assert distance({"": long.personal(0)}, {"": fresh.personal(0)}) > 1e-4
    assert int(kept.memory(1)[KEPT]["0"]["t"]) == 6


# ε is larger than usual, for Adam divides by it what rounding leaves of a gradient of 0 (a bias before BatchNorm).
KEEPING: dict[str, Any] = {
    "adam_eps": 1e-4,
    "keep_optimizer": True,
    "lr_schedule": "cosine",
    "warmup": 1,
    "clip_gradient": 1.0,
}


@pytest.mark.parametrize(
    ("method", "kind"),
    [(fs.FedRep(head_epochs=1), "adamw"), (fs.Ditto(), "sgd"), (fs.SCAFFOLD(control="gradient"), "adamw")],
)
def test_kept_state_in_both_engines_traced_and_over_the_wire(method: fs.Method, kind: str, traced) -> None:
    how = {**KEEPING, "optimizer": kind, "lr": 0.01}
    one = run(method, "normed", **how)
    stacked = run(method, "normed", engine="stacked", cohort=2, **how)
    assert distance(states(one), states(stacked)) < 1e-10
    for k in range(5):
        a, b = (dict(tree.leaves(r.memory(k))) for r in (one, stacked))
        assert a.keys() == b.keys()
        assert all(torch.allclose(a[n].double(), b[n].double(), atol=1e-10) for n in a)
    ready = simulation.prepare(method, make("normed"), ragged(), None, Training(**{**SETTINGS, **how, "engine": "one"}))
    assert identical(states(finish(ready, WIRED)), states(one))


KEPT_RUN: dict[str, Any] = {
    **KEEPING,
    "optimizer": "adamw",
    "lr": 0.01,
    "rounds": 4,
    "epochs": 1,
    "checkpoint_every": 1,
}


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_kept_state_survives_a_stop(engine: str, tmp_path) -> None:
    """Also where memories lie in the bank's tiers, as those of kept predictions do."""
    experiment = fs.Experiment(
        method=fs.PFedSD(teacher="predictions"), clients=4, engine=engine, device="cpu", participation=0.5, **KEPT_RUN
    )
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=2)
    assert identical(states(whole), states(resumed))
    for k in range(4):
        a, b = (dict(tree.leaves(r.memory(k)[KEPT])) for r in (whole, resumed))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n]) for n in a)
    taken = [int(whole.memory(k)[KEPT]["0"]["t"]) for k in range(4)]
    rounds = [sum(k in r["participants"] for r in whole.history) for k in range(4)]
    sizes = [whole.trainer.bench.plan.steps(n, 1) for n in whole.data.train.sizes]
    assert taken == [n * size for n, size in zip(rounds, sizes, strict=True)]


@pytest.mark.parametrize("method", [fs.APFL(), fs.PFedSD()], ids=lambda m: m.id)
def test_traced_programs_with_all_of_it(method: fs.Method, traced, capsys) -> None:
    """The step's number, its rate and what is drawn for its samples are tensors: one program serves all rounds."""
    how = {
        **KEEPING, "keep_optimizer": False, "optimizer": "adam", "lr": 0.01, "participation": 0.4, "augment": "flip,mixup:0.3",
        "lr_schedule_over": "steps" if method.id == "apfl" else "rounds",
    }  # fmt: skip
    data = ragged(shape=(1, 2, 2))
    one, program = (run(method, "convolved", data, engine=engine, **how) for engine in ("one", "stacked"))
    assert distance(states(one), states(program)) < 1e-10
    stages = list(program.trainer.engine.programs.stages.values())
    assert len(stages) == 1
    assert None not in stages
    assert capsys.readouterr().err == ""


# ---- phases, refusals, settings ---------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPhases(fs.FedAvg):
    """A head phase by Adam at a rate of its own, then a body phase by the experiment's optimiser."""

    id = ""

    def phases(self, task):
        """Return the head, then the body."""
        split = task.need_split()
        return fs.Phase(moves=split.head, lr=0.03, optimizer="adam"), fs.Phase(moves=split.body)


def test_a_phase_has_an_optimizer_and_a_rate_of_its_own() -> None:
    data = ragged(((9, 3),))
    how: dict[str, Any] = {"batch_size": 9, "epochs": 2, "rounds": 2, "participation": 1.0, "weight_decay": 0.0}
    ours = run(TwoPhases(), "plain", data, lr_schedule="step", lr_step=1, lr_decay=0.5, **how)
    net, (x, y) = make("plain"), (data.clients[0].x_train.double(), data.clients[0].y_train)
    for factor in (1.0, 0.5):
        for part, kind, rate in (
            (net.fc2, torch.optim.Adam, {"lr": 0.03 * factor}),
            (net.fc1, torch.optim.SGD, {"lr": 0.05 * factor, "momentum": 0.9}),
        ):
            optimiser = kind(part.parameters(), **rate)
            for _ in range(2):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimiser.step()
    assert distance({"": ours.generic()}, {"": net.state_dict()}) < 1e-12


@pytest.mark.parametrize("method", [fs.FedAvg(), fs.FedRep(head_epochs=1)], ids=lambda m: m.id)
def test_the_fused_loop_makes_way(method: fs.Method) -> None:
    """On a perceptron with a loop of its own, whatever that cannot do is done by autograd; a rate by round it can."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    for how in (
        {"optimizer": "adam"}, {"clip_gradient": 0.5}, {"augment": "mixup:0.3"}, {"keep_optimizer": True},
        {"lr_schedule": "cosine", "lr_schedule_over": "steps"}, {"lr_schedule": "cosine"},
    ):  # fmt: skip
        a, b = (run(method, net, fast=fast, rounds=2, head="2", **how) for fast in (True, False))
        by_round = how == {"lr_schedule": "cosine"}
        assert distance(states(a), states(b)) < 1e-12
        assert identical(states(a), states(b)) != by_round


REFUSED = [
    (fs.SCAFFOLD(), {"optimizer": "adam"}, "'sgd' for scaffold"),
    (fs.SCAFFOLD(), {"clip_gradient": 1.0}, "0.0 for scaffold"),
    (fs.SCAFFOLD(), {"warmup": 2, "lr_schedule_over": "steps"}, "'rounds' for scaffold"),
    (fs.APFL(), {"keep_optimizer": True}, "false for apfl"),
    (fs.PFedMe(), {"keep_optimizer": True}, "false for pfedme"),
    (fs.Ditto(), {"keep_optimizer": True, "wait_free": "fixed", "profile": "uniform"}, "wait_free"),
    (fs.FedAvg(), {"optimizer": "lion"}, "one of: sgd, adam, adamw"),
    (fs.FedAvg(), {"clip_gradient": 1.0, "privacy": "local"}, "clip_norm"),
    (fs.FedAvg(), {"augment": "mixup:0.2", "privacy": "local"}, "two samples"),
]


@pytest.mark.parametrize(("method", "how", "says"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(method: fs.Method, how: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        run(method, "plain", **how)
    assert "\n" not in str(error.value)


def test_dp_sgd_gives_its_noisy_gradient_to_the_optimizer() -> None:
    pytest.importorskip("dp_accounting")
    how: dict[str, Any] = {
        "privacy": "local",
        "privacy_delta": 1e-3,
        "optimizer": "adam",
        "lr": 0.01,
        "augment": "flip",
    }
    data, net = ragged(shape=(1, 2, 2)), nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    sgd, one, stacked = (
        run(fs.FedAvg(), net, data, **{**how, **changed})
        for changed in ({"optimizer": "sgd"}, {}, {"engine": "stacked"})
    )
    assert distance(states(one), states(stacked)) < 1e-9
    assert distance(states(one), states(sgd)) > 1e-3


def test_rates_in_one_stack_are_scheduled_and_adam_takes_each_runs_own() -> None:
    shared: dict[str, Any] = {
        "method": fs.FedAvg(), "clients": 4, "rounds": 2, "epochs": 1, "dtype": "float64", "device": "cpu",
        "engine": "stacked", "optimizer": "adamw", "weight_decay": 0.01, "lr_schedule": "cosine",
    }  # fmt: skip
    experiments = [fs.Experiment(**shared, lr=lr) for lr in (0.002, 0.02)]
    together = fs.run_together(experiments)
    for experiment, run_ in zip(experiments, together, strict=True):
        assert distance(states(fs.run(experiment)), states(run_)) < 1e-10


def test_the_command_takes_it_and_says_what_has_no_effect(tmp_path, capsys) -> None:
    flags = [
        "--optimizer",
        "adamw",
        "--lr",
        "0.002",
        "--lr-schedule",
        "cosine",
        "--warmup",
        "1",
        "--clip-gradient",
        "1",
    ]
    flags += ["--augment", "crop:1,flip", "--keep-optimizer", "--momentum", "0.5"]
    tiny = ["--rounds", "2", "--clients", "3", "--epochs", "1", "--device", "cpu"]
    assert main(["run", "fedavg", *flags, *tiny, "--out", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr()
    assert "adamw" in shown.out
    assert "--momentum has no effect with --optimizer adamw" in shown.err + shown.out
    again = fs.Experiment.from_toml(tmp_path / "a" / "experiment.toml")
    assert (again.optimizer, again.warmup, again.augment) == ("adamw", 1, "crop:1,flip")
    assert again.keep_optimizer
