"""Runs side by side: other seeds, or other values of one number, in one stack give what each gives alone."""

from __future__ import annotations

import gc
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
from fedstill.core.errors import CannotStack
from fedstill.core.method import Phase
from fedstill.core.settings import setting
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.run import simulation, together
from fedstill.run.experiment import Training
from fedstill.run.journal import Journal
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.server.coordinator import RunState
from fedstill.transport.local import LocalTransport
from fedstill.transport.messages import Order

from ..problems import SETTINGS, WIRED, Watch, cut, distance, finish, identical, make, ragged, rows, states

Sims = list[Simulation]


def prepared(method: fs.Method, seed: int = 2, model: str = "normed", same_data: bool = False, **changes):
    """One run that is ready to start, with its own data and weights where its seed is another."""
    training = Training(**{**SETTINGS, "engine": "stacked", "seed": seed, **changes})
    return prepare(method, make(model, 5 + seed), ragged(seed=0 if same_data else seed), None, training)


def starts(sims: Sims) -> list[Start]:
    return [Start(sim) for sim in sims]


def same(alone: Sequence[fs.Run], stacked: Sequence[fs.Run]) -> bool:
    """Models, losses, cohorts and scores of separate runs."""
    for a, b in zip(alone, stacked, strict=True):
        assert distance(states(a), states(b)) < 1e-10
        for x, y in zip(rows(a.history), rows(b.history), strict=True):
            assert x.keys() == y.keys()
            assert x["loss"] == pytest.approx(y["loss"], abs=1e-10)
            assert x["participants"] == y["participants"]
            assert x.get("personal_clients") == y.get("personal_clients")
            assert x.get("generic_clients") == y.get("generic_clients")
    return True


def check(make_sims) -> list[fs.Run]:
    """The same simulations one by one and side by side."""
    alone = [finish(sim) for sim in make_sims()]
    stacked = together.run_starts(starts(make_sims()))
    assert same(alone, stacked)
    return stacked


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
    assert rows(runs[0].history)[0]["participants"] != rows(runs[1].history)[0]["participants"]


def test_clients_of_other_sizes_than_the_first_runs() -> None:
    """The runs' clients need not be alike: every run's data is divided by its own seed."""
    sizes = [((13, 5), (7, 3), (1, 2)), ((2, 2), (9, 1), (22, 3))]

    def sims() -> Sims:
        training = Training(**{**SETTINGS, "engine": "stacked", "participation": 1.0})
        method = fs.PFedSD(teacher="predictions")
        return [prepare(method, make("normed"), ragged(each), None, training) for each in sizes]

    check(sims)


def test_a_stack_of_runs_as_a_traced_program(traced, capsys) -> None:
    check(lambda: [prepared(fs.PFedSD(lam=0.7), seed, "convolved", rounds=2) for seed in (2, 3)])
    assert gc.get_freeze_count() == 0  # what programs set aside is given back
    assert capsys.readouterr().err == ""


def test_a_stack_of_runs_in_small_cohorts() -> None:
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
    joined = start(starts(sims)).trainer.bench.data
    assert len(joined.train.x) == len(sims[0].data.train.x)
    assert joined.train.starts == 2 * sims[0].data.train.starts
    others = [prepared(fs.FedAvg(), seed) for seed in (2, 3)]
    joined = start(starts(others)).trainer.bench.data
    assert len(joined.train.x) == sum(len(sim.data.train.x) for sim in others)
    for r, sim in enumerate(others):
        for k in range(5):
            for name in ("train", "test"):
                x, y = joined.part(name).of(5 * r + k)
                right_x, right_y = sim.data.part(name).of(k)
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


REASONS = {
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


@pytest.mark.parametrize("reason", REASONS, ids=str)
def test_why_runs_cannot_be_stacked(reason: str) -> None:
    with pytest.raises(CannotStack, match="^" + reason) as why:
        together.run_starts(starts(REASONS[reason]()))
    assert "\n" not in str(why.value)


def test_runs_at_other_rounds_cannot_be_stacked(tmp_path) -> None:
    both = experiments(fs.FedAvg(), checkpoint_every=1)
    cut(both[0], tmp_path / "a", 2)
    sims = [simulation.begin(one).simulation for one in both]
    folders = [Journal(tmp_path / name) for name in "ab"]
    with pytest.raises(CannotStack, match="they have no checkpoints of the same round"):
        together.run_starts([Start(sim, folder, resume=True) for sim, folder in zip(sims, folders, strict=True)])


def experiments(method: fs.Method, seeds: Sequence[int] = (0, 1), **changes) -> list[fs.Experiment]:
    settings = dict(rounds=2, clients=4, epochs=1, device="cpu", dtype="float64", engine="stacked")
    return [fs.Experiment(method=method, seed=seed, **{**settings, **changes}) for seed in seeds]


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        (fs.L2GD(p=0.5), {}, "the method draws from the run's seed at its clients"),
        (fs.FedAvg(), {"forgetting": True}, "forgetting is watched run by run"),
        (fs.FedAvg(), {"engine": "one", "workers": 1}, "clients are not stacked"),
    ],
    ids=["l2gd", "forgetting", "one"],
)
def test_runs_that_cannot_be_stacked_go_one_after_another(method, changes, reason, capsys, tmp_path) -> None:
    both = experiments(method, **changes)
    alone = [simulation.run(one) for one in both]
    reported = []
    outs = [tmp_path / "a", tmp_path / "b"]
    runs = together.run_together(both, outs=outs, progress=reported.append)
    assert capsys.readouterr().err == f"fedstill: the runs go one after another: {reason}\n"
    for a, b, folder in zip(alone, runs, outs, strict=True):
        assert identical(states(a), states(b))
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert [record["round"] for record in reported] == [1, 2]


class Failing(LocalTransport):
    """A transport that fails where an order is of some kind and round, and several runs go together."""

    kind, round = "score", 1

    def dispatch(self, orders: Sequence[Order]) -> None:
        if {order.run for order in orders} > {0} and (orders[0].kind, orders[0].round) == (self.kind, self.round):
            raise RuntimeError("no memory\nfor that")
        super().dispatch(orders)


def test_a_failure_in_the_first_round_leaves_nothing_behind(capsys) -> None:
    """Scoring fails after memories were changed: the runs that follow start from the beginning all the same."""
    both = experiments(fs.PFedSD())
    alone = [simulation.run(one) for one in both]
    runs = together.run_together(both, transport=Failing)
    assert capsys.readouterr().err == "fedstill: the runs go one after another: no memory\n"
    assert all(identical(states(a), states(b)) for a, b in zip(alone, runs, strict=True))


def test_a_failure_later_is_raised() -> None:
    class Later(Failing):
        kind, round = "train", 2

    with pytest.raises(RuntimeError, match="no memory"):
        together.run_together(experiments(fs.FedAvg()), transport=Later)


@pytest.mark.parametrize("method", [fs.PFedSD(teacher="predictions"), fs.SCAFFOLD()], ids=lambda m: m.id)
def test_the_wire_changes_nothing(method: fs.Method) -> None:
    runs, wired = (
        together.run_starts(starts([prepared(method, seed) for seed in (2, 3)]), transport)
        for transport in (None, WIRED)
    )
    for a, b in zip(runs, wired, strict=True):
        assert identical(states(a), states(b))
        assert rows(a.history) == rows(b.history)


def test_each_run_has_its_own_callbacks() -> None:
    watches = [Watch(), Watch()]
    sims = [prepared(fs.FedAvg(), seed) for seed in (2, 3)]
    runs = together.run_starts([Start(sim, callbacks=[watch]) for sim, watch in zip(sims, watches, strict=True)])
    for run, watch in zip(runs, watches, strict=True):
        assert len(watch.servers) == 3
        assert identical({"": watch.servers[-1]["params"]}, {"": run.server["params"]})
    assert not identical({"": watches[0].servers[-1]["params"]}, {"": watches[1].servers[-1]["params"]})


# ---- from the command line -------------------------------------------------------------------------------------------
def test_the_command_runs_seeds_side_by_side(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    sessions = []
    begin = together.start
    monkeypatch.setattr(together, "start", lambda runs, *more: sessions.append(len(runs)) or begin(runs, *more))
    flags = ["--engine", "stacked", "--rounds", "2", "--clients", "4", "--epochs", "1", "--dtype", "float64"]
    assert main(["run", "fedavg", *flags, "--seeds", "2", "--out", "both"]) == 0
    assert sessions == [2]
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
def test_a_coordinator_is_a_conversation() -> None:
    """Requests out, replies in; carried by hand it gives what a run gives."""
    session, whole = start([Start(prepared(fs.PFedSD()))]), finish(prepared(fs.PFedSD()))
    (coordinator,) = session.coordinators
    edge, talk, kinds = session.driver.transport.edge, coordinator.talk(), []
    request = next(talk)
    while request is not None:
        assert len({(order.kind, order.round) for order in request.orders}) == 1
        kinds.append((request.orders[0].kind, len(request.orders)))
        try:
            request = talk.send(list(edge.handle(request.orders)))
        except StopIteration:
            request = None
    assert kinds == [("train", 3), ("score", 5)] * 3
    assert identical({"": coordinator.state.server["params"]}, {"": whole.server["params"]})
    assert rows(coordinator.state.history) == rows(whole.history)


def test_a_coordinator_continues_after_its_history() -> None:
    history = finish(prepared(fs.FedAvg())).history
    for rounds in (2, 3):
        (coordinator,) = start([Start(prepared(fs.FedAvg()))]).coordinators
        coordinator.load_state(RunState(coordinator.state.server, history[:rounds]), {})
        request = next(coordinator.talk(), None)
        asked = [] if request is None else [(order.kind, order.round) for order in request.orders]
        assert asked == ([("train", 3)] * 3 if rounds == 2 else [])


def test_the_edge_keeps_each_runs_memories() -> None:
    """Run by run the initial ones are those of its own weights; what is put back belongs to one client of one run."""
    sims = [prepared(fs.PFedSD(), seed) for seed in (2, 3)]
    driver = start(starts(sims)).driver
    edge = driver.transport.edge

    def memory(run: int, client: int) -> dict:
        return edge.store.get(run * 5 + client)["v"]

    for run, sim in enumerate(sims):
        for k in (0, 4):
            assert identical({"": memory(run, k)}, {"": sim.initial})
    assert not identical({"": memory(0, 0)}, {"": memory(1, 0)})
    changed = {"v": {name: value + 1 for name, value in sims[1].initial.items()}}
    down = {"memory": changed, "report": {"last": torch.tensor(2.0)}}
    driver.ask([Order("restore", 1, 2, down, run=1)], run=1)
    assert identical({"": memory(1, 2)}, {"": changed["v"]})
    for run, k in ((0, 2), (1, 1), (1, 3)):
        assert identical({"": memory(run, k)}, {"": sims[run].initial})
    (state,) = driver.ask([Order("state", 1, 2, run=1)], run=1)
    assert state.report["last"] == 2
    assert identical({"": state.up["memory"]["v"]}, {"": changed["v"]})
    (state,) = driver.ask([Order("state", 1, 2, run=0)], run=0)
    assert (state.up, state.report["last"]) == ({}, 0)


def test_replies_carry_each_runs_own_clients() -> None:
    session = start(starts([prepared(fs.FedAvg(), seed) for seed in (2, 3)]))
    requests = {coordinator.run: next(coordinator.talk()) for coordinator in session.coordinators}
    replies = session.driver.exchange(requests)
    for run, request in requests.items():
        assert [(r.run, r.client) for r in replies[run]] == [(run, order.client) for order in request.orders]
    assert [r.client for r in replies[0]] != [r.client for r in replies[1]]  # or nothing is shown
