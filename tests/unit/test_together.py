"""Runs side by side: other seeds, or other values of one number, in one stack give what each gives alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedstill as fs
from fedstill.cli import main
from fedstill.core.batch import Batch
from fedstill.core.method import Phase
from fedstill.core.settings import setting
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.run import fleet, simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, distance, identical, make, ragged, states

Sims = list[simulation.Simulation]


def prepared(method: fs.Method, seed: int = 2, model: str = "normed", same_data: bool = False, **changes):
    """One run that is ready to start, with its own data and weights where its seed is another."""
    how = Training(**{**SETTINGS, "engine": "stacked", "seed": seed, **changes})
    return simulation.prepare(method, make(model, 5 + seed), ragged(seed=0 if same_data else seed), None, how)


def records(run: fs.Run) -> list[dict]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in run.history]


def same(alone: Sequence[fs.Run], abreast: Sequence[fs.Run]) -> bool:
    """Models, losses, cohorts and scores of separate runs."""
    for a, b in zip(alone, abreast, strict=True):
        assert distance(states(a), states(b)) < 1e-10
        for x, y in zip(records(a), records(b), strict=True):
            assert x.keys() == y.keys()
            assert x["loss"] == pytest.approx(y["loss"], abs=1e-10)
            assert x["participants"] == y["participants"]
            assert x.get("personal_clients") == y.get("personal_clients")
            assert x.get("generic_clients") == y.get("generic_clients")
    return True


def check(make_sims) -> list[fs.Run]:
    """The same simulations one by one and as a fleet."""
    alone = [sim.run() for sim in make_sims()]
    abreast = fleet.run([sim.start() for sim in make_sims()])
    assert same(alone, abreast)
    return abreast


# ---- seeds -----------------------------------------------------------------------------------------------------------
SEEDED = [
    fs.FedAvg(),
    fs.SCAFFOLD(),  # a memory, and a server's state
    fs.PFedSD(teacher="predictions"),  # a memory for each sample
    fs.FedBSD(lam=0.8, head_epochs=1, backbone_epochs=1),  # two phases
    fs.APFL(alpha=0.4),  # a whole step of its own
    fs.FedFomo(m=2),  # draws from the seed at the server
]


@pytest.mark.parametrize("method", SEEDED, ids=lambda m: m.id)
def test_seeds_in_one_stack_equal_separate_runs(method: fs.Method) -> None:
    runs = check(lambda: [prepared(method, seed) for seed in (2, 3, 4)])
    assert distance(states(runs[0]), states(runs[1])) > 1e-3  # or nothing was shown
    assert records(runs[0])[0]["participants"] != records(runs[1])[0]["participants"]


def test_clients_of_other_sizes_than_the_first_runs() -> None:
    """The runs' clients need not be alike: every run's data is divided by its own seed."""
    sizes = [((13, 5), (7, 3), (1, 2)), ((2, 2), (9, 1), (22, 3))]

    def sims() -> Sims:
        how = Training(**{**SETTINGS, "engine": "stacked", "participation": 1.0})
        return [
            simulation.prepare(fs.PFedSD(teacher="predictions"), make("normed"), ragged(part), None, how)
            for part in sizes
        ]

    check(sims)


def test_a_fleet_as_a_traced_program(traced, capsys) -> None:
    check(lambda: [prepared(fs.PFedSD(lam=0.7), seed, "convolved", rounds=2) for seed in (2, 3)])
    assert capsys.readouterr().err == ""


def test_a_fleet_in_small_cohorts() -> None:
    check(lambda: [prepared(fs.SCAFFOLD(), seed, cohort=2) for seed in (2, 3)])


# ---- values of one number --------------------------------------------------------------------------------------------
VALUES = [
    (fs.PFedSD(lam=0.3), fs.PFedSD(lam=2.0), fs.PFedSD(lam=0.9)),
    (fs.FedProx(mu=0.1), fs.FedProx(mu=1.0)),
    (fs.FedBSD(lam=0.3, head_epochs=1), fs.FedBSD(lam=3.0, head_epochs=1)),
    (fs.FedDyn(alpha=0.3), fs.FedDyn(alpha=0.6)),
    (fs.PerFedAvg(alpha=0.1), fs.PerFedAvg(alpha=0.02)),
    (fs.CD2PFed(progressive=False, distill=False, beta=0.3), fs.CD2PFed(progressive=False, distill=False, beta=0.9)),
    (fs.APFL(alpha=0.3), fs.APFL(alpha=0.7)),
]


@pytest.mark.parametrize("methods", VALUES, ids=lambda m: m[0].id)
def test_values_of_a_field_in_one_stack_equal_separate_runs(methods: tuple[fs.Method, ...]) -> None:
    runs = check(lambda: [prepared(method) for method in methods])
    assert distance(states(runs[0]), states(runs[1])) > 1e-6


@pytest.mark.parametrize("method", [fs.FedAvg(), fs.SCAFFOLD(), fs.PFedMe()], ids=lambda m: m.id)
def test_learning_rates_in_one_stack_equal_separate_runs(method: fs.Method) -> None:
    """SCAFFOLD divides by η, pFedMe steps by it: what a method reads is the client's own."""
    runs = check(lambda: [prepared(method, lr=lr) for lr in (0.05, 0.2)])
    assert distance(states(runs[0]), states(runs[1])) > 1e-3


def test_fields_and_rates_as_a_traced_program(traced, capsys) -> None:
    pairs = ((0.3, 0.05), (2.0, 0.1))
    check(lambda: [prepared(fs.PFedSD(lam=lam), model="plain", lr=lr, rounds=1) for lam, lr in pairs])
    check(lambda: [prepared(method, model="plain", rounds=1) for method in VALUES[5]])  # smoothing after each epoch
    assert capsys.readouterr().err == ""


def test_runs_on_the_same_data_share_it() -> None:
    sims = [prepared(fs.PFedSD(lam=lam), seed, same_data=True) for lam, seed in ((0.3, 2), (2.0, 3))]
    joined = fleet.Fleet([sim.start() for sim in sims]).trainer.bench.data
    assert len(joined.train.x) == len(sims[0].trainer.data.train.x)
    assert joined.train.starts == 2 * sims[0].trainer.data.train.starts
    apart = [prepared(fs.FedAvg(), seed) for seed in (2, 3)]
    joined = fleet.Fleet([sim.start() for sim in apart]).trainer.bench.data
    assert len(joined.train.x) == sum(len(sim.trainer.data.train.x) for sim in apart)
    for r, sim in enumerate(apart):
        for k in range(5):
            for name in ("train", "test"):
                x, y = joined.part(name).of(5 * r + k)
                right_x, right_y = sim.trainer.data.part(name).of(k)
                assert torch.equal(x, right_x)
                assert torch.equal(y, right_y)


# ---- what cannot go together -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Paced(fs.FedAvg):
    """A phase with a learning rate of its own."""

    pace: float = setting(0.05, "η of the phase", above=0)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        return (Phase(lr=self.pace),)


@dataclass(frozen=True, kw_only=True)
class Branching(fs.FedAvg):
    """A loss that branches on a value."""

    mu: float = setting(0.0, "a weight", least=0)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        return self.fit(task, params, batch) * (2.0 if self.mu > 0.5 else 1.0)


APART = {
    "rounds differs": lambda: [prepared(fs.FedAvg(), rounds=rounds) for rounds in (1, 2)],
    "batch_size differs": lambda: [prepared(fs.FedAvg(), batch_size=size) for size in (4, 5)],
    "their methods differ": lambda: [prepared(fs.FedAvg()), prepared(fs.Local())],
    "k is no floating number": lambda: [prepared(fs.PFedMe(k=k)) for k in (2, 3)],
    "teacher is no floating number": lambda: [prepared(fs.PFedSD(teacher=t)) for t in ("model", "predictions")],
    "the method draws from the run's seed at its clients": lambda: [prepared(fs.L2GD(p=0.5), seed) for seed in (2, 3)],
    "forgetting is watched run by run": lambda: [prepared(fs.FedAvg(), seed, forgetting=True) for seed in (2, 3)],
    "clients are not stacked": lambda: [prepared(fs.FedAvg(), seed, engine="one") for seed in (2, 3)],
    "the optimiser of a phase differs": lambda: [prepared(Paced(pace=pace)) for pace in (0.05, 0.1)],
    "fedavg branches on mu": lambda: [prepared(Branching(mu=mu)) for mu in (0.1, 0.9)],
    "their models or their numbers of clients differ": lambda: [
        prepared(fs.FedAvg(), model=model) for model in ("plain", "normed")
    ],
}


@pytest.mark.parametrize("reason", APART, ids=str)
def test_what_keeps_runs_apart(reason: str) -> None:
    with pytest.raises(fleet.Apart, match="^" + reason) as why:
        fleet.run([sim.start() for sim in APART[reason]()])
    assert "\n" not in str(why.value)


def test_runs_at_other_rounds_are_kept_apart() -> None:
    courses = [prepared(fs.FedAvg(), seed).start() for seed in (2, 3)]
    courses[1].first = 2
    with pytest.raises(fleet.Apart, match="not at the same round"):
        fleet.run(courses)


def experiments(method: fs.Method, seeds: Sequence[int] = (0, 1), **changes) -> list[fs.Experiment]:
    given = {
        "rounds": 2,
        "clients": 4,
        "epochs": 1,
        "device": "cpu",
        "dtype": "float64",
        "engine": "stacked",
        **changes,
    }
    return [fs.Experiment(method=method, seed=seed, **given) for seed in seeds]


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        (fs.L2GD(p=0.5), {}, "the method draws from the run's seed at its clients"),
        (fs.FedAvg(), {"forgetting": True}, "forgetting is watched run by run"),
        (fs.FedAvg(), {"engine": "one", "workers": 1}, "clients are not stacked"),
    ],
    ids=["l2gd", "forgetting", "one"],
)
def test_runs_that_are_kept_apart_go_one_after_another(method, changes, reason, capsys, tmp_path) -> None:
    both = experiments(method, **changes)
    alone = [simulation.run(one) for one in both]
    told = []
    outs = [tmp_path / "a", tmp_path / "b"]
    found = fleet.run_together(both, outs=outs, progress=told.append)
    assert capsys.readouterr().err == f"fedstill: the runs go one after another: {reason}\n"
    for a, b, folder in zip(alone, found, outs, strict=True):
        assert identical(states(a), states(b))
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert [record["round"] for record in told] == [1, 2]


def test_a_failure_in_the_first_round_leaves_nothing_behind(monkeypatch, capsys) -> None:
    """Scoring fails after memories were changed: the runs that follow start from the beginning all the same."""
    both = experiments(fs.PFedSD())
    alone = [simulation.run(one) for one in both]
    handle = fleet.Fleet.handle

    def failing(self, orders):
        if orders[0][0].kind == "score":
            raise RuntimeError("no memory\nfor that")
        return handle(self, orders)

    monkeypatch.setattr(fleet.Fleet, "handle", failing)
    found = fleet.run_together(both)
    assert capsys.readouterr().err == "fedstill: the runs go one after another: no memory\n"
    assert all(identical(states(a), states(b)) for a, b in zip(alone, found, strict=True))


def test_a_failure_later_is_raised(monkeypatch) -> None:
    handle = fleet.Fleet.handle

    def failing(self, orders):
        if orders[0][0].round == 2:
            raise RuntimeError("no memory")
        return handle(self, orders)

    monkeypatch.setattr(fleet.Fleet, "handle", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        fleet.run_together(experiments(fs.FedAvg()))


# ---- from the command line -------------------------------------------------------------------------------------------
def test_the_command_runs_seeds_side_by_side(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    fleets = []
    begin = fleet.Fleet.__init__
    monkeypatch.setattr(
        fleet.Fleet, "__init__", lambda self, courses: fleets.append(len(courses)) or begin(self, courses)
    )
    flags = ["--engine", "stacked", "--rounds", "2", "--clients", "4", "--epochs", "1", "--dtype", "float64"]
    assert main(["run", "fedavg", *flags, "--seeds", "2", "--out", "both"]) == 0
    assert fleets == [2]
    assert capsys.readouterr().err == ""
    folders = sorted(Path("both").rglob("metrics.jsonl"))
    assert len(folders) == 2
    for seed, file in enumerate(folders):
        assert fs.Experiment.from_toml(file.parent / "experiment.toml").seed == seed
        assert main(["run", "fedavg", *flags, "--seed", str(seed), "--out", f"alone-{seed}"]) == 0
        for ours, theirs in zip(
            file.read_text().splitlines(), Path(f"alone-{seed}", "metrics.jsonl").read_text().splitlines(), strict=True
        ):
            a, b = json.loads(ours), json.loads(theirs)
            assert a["generic_clients"] == b["generic_clients"]
            assert a["participants"] == b["participants"]
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)


# ---- the coordinator's side ------------------------------------------------------------------------------------------
def test_a_course_is_a_conversation() -> None:
    """Orders out, replies in, after each round its record; carried by hand it gives what `rounds` gives."""
    course, other = (prepared(fs.PFedSD()).start() for _ in range(2))
    talk = course.coordinator.course(course.server)
    kinds, ends, said = [], [], next(talk)
    while said is not None:
        if isinstance(said, list):
            assert len({(order.kind, order.round) for order in said}) == 1
            kinds.append((said[0].kind, len(said)))
            said = talk.send(list(course.controller.handle(said)))
        else:
            ends.append(said)
            said = next(talk, None)
    assert kinds == [("train", 3), ("score", 5)] * 3
    expected = list(other.coordinator.rounds(other.server))
    for (server, record), (right, noted) in zip(ends, expected, strict=True):
        assert all(torch.equal(server["params"][n], v) for n, v in right["params"].items())
        assert {k: v for k, v in record.items() if "seconds" not in k} == {
            k: v for k, v in noted.items() if "seconds" not in k
        }


def test_a_course_can_begin_later() -> None:
    course = prepared(fs.FedAvg()).start()
    talk = course.coordinator.course(course.server, 3)
    assert [(order.kind, order.round) for order in next(talk)] == [("train", 3)] * 3
    over = course.coordinator.course(course.server, 4)
    assert next(over, None) is None


def test_the_stores_keep_each_runs_memories() -> None:
    sims = [prepared(fs.SCAFFOLD(), seed) for seed in (2, 3)]
    courses = [sim.start() for sim in sims]
    stores = fleet.Fleet(courses).stores
    clients = [7, 0, 4, 5]  # of the second run 2 and 0, of the first 0 and 4
    before = stores.gather(clients)
    numbers = torch.arange(4, dtype=torch.float64)
    changed = fs.tree.map(lambda t: t + numbers.reshape(-1, *[1] * (t.ndim - 1)).to(t.dtype), before)
    stores.prefetch(clients)
    stores.scatter(clients, changed)
    for row, (run, own) in enumerate(((1, 2), (0, 0), (0, 4), (1, 0))):
        mine = courses[run].store.get(own)
        assert all(torch.equal(leaf, changed_[row]) for (_, leaf), (_, changed_) in zip(
            fs.tree.leaves(mine), fs.tree.leaves(changed), strict=True
        ))  # fmt: skip
        again = stores.get(clients[row])
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(fs.tree.leaves(mine), fs.tree.leaves(again), strict=True)
        )
    stores.put(9, fs.tree.unstack(changed, 0))
    assert fs.tree.flatten(courses[1].store.get(4)).keys() == fs.tree.flatten(changed).keys()


def test_replies_carry_each_runs_own_clients() -> None:
    courses = [prepared(fs.FedAvg(), seed).start() for seed in (2, 3)]
    both = fleet.Fleet(courses)
    orders = [next(course.coordinator.course(course.server)) for course in courses]
    replies = both.handle(orders)
    assert [[reply.client for reply in part] for part in replies] == [
        [order.client for order in part] for part in orders
    ]
