"""A phase as a program: traced, replayed on fixed memory in a few sizes; against the plain way and one client at a time."""

from __future__ import annotations

import copy
import dataclasses
import gc
import shutil
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import fedstill as fs
from fedstill.core import files, tree
from fedstill.core.batch import Batch
from fedstill.core.method import Phase
from fedstill.core.plan import JointPlan
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.engine import program, stackable
from fedstill.engine.bench import TooMany, Work
from fedstill.engine.stacked import Stacked
from fedstill.engine.stage import Stage
from fedstill.engine.step import each_step
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.run.journal import Journal

from ..problems import SETTINGS, distance, finish, identical, make, ragged, run, states

WIDE = ((25, 5), (1, 3), (2, 2), (9, 4), (13, 1), (3, 2), (17, 3))  # 14, 2, 2, 6, 8, 2 and 10 steps in two epochs


# ---- sizes ----------------------------------------------------------------------------------------------------------------
def test_the_sizes_that_a_stack_runs_in() -> None:
    assert program.levels(1) == [1]
    assert program.levels(2) == [2, 1]
    assert program.levels(10) == [10, 5, 3, 2]
    assert program.levels(100) == [100, 50, 25, 13]
    assert [program.fitting([10, 5, 3, 2], active) for active in (10, 6, 5, 4, 3, 2, 1)] == [10, 10, 5, 5, 3, 2, 2]


@given(st.integers(1, 300))
def test_few_sizes_and_each_holds_what_it_is_for(most: int) -> None:
    sizes = program.levels(most)
    assert sizes[0] == most
    assert len(sizes) <= 4
    for active in range(1, most + 1):
        held = program.fitting(sizes, active)
        assert held in sizes
        assert held >= active
        assert not any(active <= size < held for size in sizes)


@given(st.lists(st.integers(1, 12), max_size=8))
def test_how_many_are_at_work(lengths: list[int]) -> None:
    lengths = sorted(lengths, reverse=True)
    active = list(each_step(lengths))
    assert len(active) == max(lengths, default=0)
    assert sum(active) == sum(lengths)
    for client, length in enumerate(lengths):
        assert sum(client < a for a in active) == length


# ---- the same numbers as step by step -------------------------------------------------------------------------------------
def run_by(how: dict, method: fs.Method, model: str | nn.Module = "plain", data=None, **changes) -> fs.Run:
    """A stacked run whose programs are traced or built in another way."""
    module = make(model) if isinstance(model, str) else model
    settings = Training(**{**SETTINGS, "engine": "stacked", "compile": "traced", **changes})
    ready = simulation.prepare(method, module, data or ragged(), None, settings)
    for name, function in how.items():
        setattr(ready.trainer.engine.programs, name, function)
    return finish(ready)


def arenas(run: fs.Run) -> list[Stage | None]:
    return list(run.trainer.engine.programs.stages.values())


@pytest.mark.parametrize("model", ["normed", "convolved"])
def test_clients_leave_the_stack(model: str, traced, capsys) -> None:
    data = ragged(WIDE)
    method, how = fs.PFedSD(lam=0.7, tau=2.0), {"participation": 1.0, "rounds": 2}
    program = run(method, model, data, engine="stacked", **how)
    (arena,) = arenas(program)
    assert sorted(arena.programs) == [1, 2, 4, 7]
    assert arena.size == 7
    assert capsys.readouterr().err == ""
    assert gc.get_freeze_count() == 0  # what tracing left behind can be freed again
    assert distance(states(run(method, model, data, engine="one", **how)), states(program)) < 1e-10
    assert identical(states(run(method, model, data, engine="stacked", **how)), states(program))  # same seed, same bits


def test_a_program_equals_the_plain_way_without_momentum_and_with_nesterov() -> None:
    for how in ({"momentum": 0.0, "weight_decay": 0.0}, {"nesterov": True}, {"batch_size": 13}):
        plain = run(fs.FedAvg(), "plain", engine="stacked", **how)
        traced = run(fs.FedAvg(), "plain", engine="stacked", compile="traced", **how)
        assert traced.trainer.engine.way == "traced"
        assert distance(states(plain), states(traced)) < 1e-12


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_batches_are_drawn_once_and_ahead_where_everybody_takes_part(share: float, traced, monkeypatch) -> None:
    asked, tables = [], JointPlan.tables

    def look(self, round, *given):
        asked.append(round)
        return tables(self, round, *given)

    monkeypatch.setattr(JointPlan, "tables", look)
    how = {"participation": share, "rounds": 3}
    when = []  # how many rounds were over when each was drawn
    ended = Stacked.train

    def count(self, *given):
        yield from ended(self, *given)
        when.append(len(asked))

    monkeypatch.setattr(Stacked, "train", count)
    found = run(fs.Ditto(), engine="stacked", **how)  # two phases
    assert when == ([2, 3, 3] if share == 1 else [1, 2, 3])
    assert asked == [1, 2, 3]  # both models see the same batches
    assert {key[0] for key in found.trainer.engine.drawn} == {3}
    assert distance(states(run(fs.Ditto(), engine="one", **how)), states(found)) < 1e-10


class Pools(nn.Module):
    """Pooling as a module, as a function, and where windows overlap."""

    head_modules = "out"

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.out = nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv(x.reshape(-1, 1, 6, 6))))  # zeros after ReLU: many windows are ties
        x = nn.functional.max_pool2d(nn.functional.max_pool2d(x, 2, 1), 2)
        return self.out(x.flatten(1))


def test_pooling_has_a_gradient_of_its_own() -> None:
    met = []

    def look(*given):
        graph, names = program.trace(*given)
        met.append([str(node.target) for node in graph.graph.nodes if "max_pool" in str(node.target)])
        return graph, names

    g = torch.Generator().manual_seed(0)
    parts = [(torch.randn(n, 36, generator=g), torch.arange(n) % 3) * 2 for n in (9, 4)]
    data = fs.Federation.from_arrays(parts, classes=3)
    model = Pools()
    one = run(fs.FedAvg(), model, data, participation=1.0)
    stacked = run_by({"trace": look}, fs.FedAvg(), model, data, participation=1.0)
    assert met
    assert all(sorted(set(names)) == [f"aten.max_pool2d_with_indices{end}.default" for end in ("", "_backward")]
               and len(names) == 2 for names in met)  # the one that overlaps, forward and backward  # fmt: skip
    assert distance(states(one), states(stacked)) < 1e-10


def trainer_of(method: fs.Method, model: str = "normed", **changes):
    """A trainer, and a cohort's work of the first round."""
    how = Training(**{**SETTINGS, "engine": "stacked", **changes})
    sim = simulation.prepare(method, make(model), ragged(WIDE), None, how)
    task = sim.trainer.bench.task
    server = method.init_server(task, sim.initial)

    def works(clients: list[int]) -> list[Work]:
        memory = method.init_client(task, sim.initial)
        return [Work(k, method.send(task, server, k), tree.clone(memory)) for k in clients]

    return sim.trainer, works


def test_cohorts_of_other_sizes_later(traced) -> None:
    """A larger cohort gets new memory; a smaller one leaves rows without a client, whatever an earlier one left there."""
    trainer, works = trainer_of(fs.SCAFFOLD())
    oracle, _ = trainer_of(fs.SCAFFOLD(), engine="one")
    rows = []
    for round, clients in enumerate(([3, 1], [0, 2, 4, 5, 6], [6, 0, 1], [5]), start=1):
        found, right = (list(t.train(round, works(clients))) for t in (trainer, oracle))
        (arena,) = trainer.engine.programs.stages.values()
        rows.append(arena.size)
        for a, b in zip(found, right, strict=True):
            assert (a.client, a.steps, a.samples, a.finite) == (b.client, b.steps, b.samples, b.finite)
            assert a.loss == pytest.approx(b.loss, abs=1e-10)
            for mine, other in ((a.up, b.up), (a.memory, b.memory)):
                for (name, x), (_, y) in zip(tree.leaves(mine), tree.leaves(other), strict=True):
                    assert torch.allclose(x, y, atol=1e-10), name
    assert rows == [2, 5, 5, 5]


@dataclass(frozen=True, kw_only=True)
class Weighed(fs.FedAvg):
    """A loss that grows with the round."""

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        return task.round * self.fit(task, params, batch)


def test_a_loss_that_asks_for_the_round_goes_step_by_step(traced, capsys) -> None:
    found = run(Weighed(), "normed", engine="stacked")
    assert arenas(found) == [None]
    assert capsys.readouterr().err == ""  # by design, so nothing to say
    assert distance(states(run(Weighed(), "normed")), states(found)) < 1e-10
    assert distance(states(run(fs.FedAvg(), "normed")), states(found)) > 1e-3


@dataclass(frozen=True, kw_only=True)
class Phased(fs.FedAvg):
    """Phases that go by the round: with a loss made for it, with one of two of the method's own, or so many epochs."""

    how: str = fs.setting("made", "made, epochs or own")

    def phases(self, task: Task) -> tuple[Phase, ...]:
        if self.how == "made":
            weight = float(task.round)
            return (Phase(loss=lambda task, params, local, batch: weight * self.fit(task, params, batch)),)
        if self.how == "epochs":
            return (Phase(epochs=1 + task.round % 2),)
        return (Phase(loss=self.doubled if task.round % 2 else None),)

    def doubled(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        return 2 * self.fit(task, params, batch)


@pytest.mark.parametrize(("how", "again"), [("made", False), ("epochs", False), ("own", True)])
def test_phases_that_go_by_the_round(how: str, again: bool, traced, capsys) -> None:
    """A program is used in another round only where the phase is sure to be the same."""
    found = run(Phased(how=how), "plain", engine="stacked", rounds=4)
    assert [stage is not None for stage in arenas(found)] == ([True, True] if again else [False] * len(arenas(found)))
    assert capsys.readouterr().err == ""
    assert distance(states(run(Phased(how=how), "plain", rounds=4)), states(found)) < 1e-10
    assert distance(states(run(fs.FedAvg(), "plain", rounds=4)), states(found)) > 1e-3


@dataclass(frozen=True, kw_only=True)
class Untraceable(fs.FedAvg):
    """A loss that does not let itself be traced."""

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        if get_proxy_mode() is not None:
            raise NotImplementedError("no tracing here\nand this is not shown")
        return self.fit(task, params, batch)


def test_a_step_that_cannot_be_traced_says_so_once(traced, capsys) -> None:
    found = run(Untraceable(), "normed", engine="stacked")
    assert arenas(found) == [None]
    err = capsys.readouterr().err
    assert err.startswith("fedstill: phase 1 runs step by step, its step could not be traced: no tracing here\n")
    assert err.count("\n") == 1
    assert distance(states(run(Untraceable(), "normed")), states(found)) < 1e-10


@dataclass(frozen=True, kw_only=True)
class Steep(fs.FedAvg):
    """A client with one sample has an infinite slope as soon as it has taken its one step: nobody may look there."""

    def fit(self, task: Task, params: Params, batch: Batch) -> Tensor:
        moved = (params["fc2.bias"].detach() - task.net.module.fc2.bias.detach()).abs().sum()
        endless = (task.here().samples == 1) & (moved > 0)
        return super().fit(task, params, batch) * torch.where(endless, torch.inf, 1.0)


def test_a_client_that_has_finished_stays_where_it_is(traced) -> None:
    """Rows that run along must not make a weight of 0·∞."""
    how = {"participation": 1.0, "rounds": 1, "epochs": 1}
    one, found = run(Steep(), "plain", **how), run(Steep(), "plain", engine="stacked", **how)
    assert arenas(found) != [None]
    assert all(torch.isfinite(v).all() for v in one.generic().values())
    assert distance(states(one), states(found)) < 1e-10


class Constant(nn.Module):
    """Adds a tensor that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor([1.0, -2.0, 0.5, 3.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(x + self.shift))


def test_a_model_with_constants_outside_of_its_state(traced, capsys) -> None:
    model = Constant().double()
    one, found = (
        fs.simulate(fs.FedAvg(), model=model, data=ragged(), **SETTINGS, engine=name) for name in ("one", "stacked")
    )
    assert arenas(found)[0] is not None
    assert capsys.readouterr().err == ""
    assert distance(states(one), states(found)) < 1e-10


# ---- compiling --------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_a_compiled_step(capsys) -> None:
    """The one test of inductor's code, which takes it about ten seconds: one phase of one size."""
    data, how = ragged(((8, 2), (8, 3), (8, 1))), {"participation": 1.0, "rounds": 2}
    found = run(fs.FedProx(mu=0.3), "plain", data, engine="stacked", compile="on", **how)
    assert found.trainer.engine.programs.level == "compiled"
    assert capsys.readouterr().err == ""
    assert distance(states(run(fs.FedProx(mu=0.3), "plain", data, **how)), states(found)) < 1e-10


@pytest.mark.parametrize("method", [fs.PFedSD(), fs.PFedMe()], ids=lambda m: m.id)  # a loss, and a step of its own
def test_a_step_that_cannot_be_replayed_goes_step_by_step(method, capsys) -> None:
    """As where a CUDA graph cannot be captured: the phase starts again from what it was given."""

    def refuse(*given):
        given[1]["total"].add_(1e6)  # an attempt may leave anything behind in its own memory
        raise RuntimeError("no graph\nof that")

    found = run_by({"build": refuse}, method)
    assert arenas(found) == [None]
    assert capsys.readouterr().err == (
        "fedstill: phase 1 runs step by step, its step could not be replayed: no graph\n"
    )
    one = run(method, "plain")
    assert distance(states(one), states(found)) < 1e-10
    assert [a["loss"] for a in found.history] == pytest.approx([b["loss"] for b in one.history])


def test_a_step_that_cannot_be_compiled_is_replayed_as_traced(capsys) -> None:
    def refuse(*given):
        if given[5] == "compiled":
            raise RuntimeError("no compiler\nat all")
        return program.build(*given)

    found = run_by({"build": refuse}, fs.FedAvg(), compile="on")
    assert found.trainer.engine.programs.level == "traced"
    assert capsys.readouterr().err == "fedstill: the step runs without being compiled: no compiler\n"
    assert arenas(found)[0] is not None
    assert distance(states(run(fs.FedAvg(), "plain")), states(found)) < 1e-10


def test_which_way_a_run_goes() -> None:
    def way(**changes) -> str:
        return trainer_of(fs.FedAvg(), "plain", **changes)[0].engine.way

    assert way() == way(compile="off") == way(compile="on", fast=False) == "plain"
    assert way(compile="on") == "compiled"
    bench = trainer_of(fs.FedAvg(), "plain")[0].bench  # 14 steps a round of the longest client, three rounds
    net = copy.copy(bench.net)
    net.device = torch.device("cuda")
    far = dataclasses.replace(bench.task, net=net, rounds=3)
    for compile, rounds, right in (("auto", 3, "traced"), ("auto", 143, "compiled"), ("off", 143, "traced")):
        task = dataclasses.replace(far, rounds=rounds)
        assert stackable.way_of(dataclasses.replace(bench, task=task), compile, True) == right
    assert stackable.way_of(dataclasses.replace(bench, task=far), "on", True) == "compiled"
    assert stackable.way_of(dataclasses.replace(bench, task=far), "on", False) == "plain"


# ---- what fits into memory ----------------------------------------------------------------------------------------------
class Cramped(Stacked):
    """An engine with memory for two clients at a time; `sizes` are how many were trained at once."""

    def train(self, bench, round, works, store=None):
        if len(works) > 2:
            raise TooMany(2)
        self.sizes = [*getattr(self, "sizes", []), len(works)]
        yield from super().train(bench, round, works, store)


def cramped(method: fs.Method, model: str, **changes) -> simulation.Simulation:
    how = Training(**{**SETTINGS, "engine": "stacked", "participation": 1.0, **changes})
    ready = simulation.prepare(method, make(model), ragged(), None, how)
    ready.trainer.engine = Cramped(ready.trainer.engine.way, programs=ready.trainer.engine.programs)
    return ready


def test_too_many_clients_are_trained_in_smaller_groups() -> None:
    method, how = fs.PFedSD(teacher="predictions"), {"participation": 1.0}
    ready = cramped(method, "normed")
    found = finish(ready)
    assert ready.trainer.engine.sizes == [2, 2, 1] * 3
    assert found.trainer.choices.cohort == 2
    assert distance(states(run(method, "normed", **how)), states(found)) < 1e-10


def stop_after(round: int):
    def progress(record: dict) -> None:
        if record["round"] == round:
            raise KeyboardInterrupt

    return progress


def test_what_was_found_is_kept_and_used_again(tmp_path) -> None:
    """choices.json: how many clients fit, and which convolution was fastest, are not looked for again."""

    def prepared() -> simulation.Simulation:
        return cramped(fs.FedAvg(), "convolved", compile="traced")

    whole = finish(prepared())
    journal = Journal(tmp_path / "run")
    journal.begin("", {}, torch.device("cpu"))
    first = prepared()
    with pytest.raises(KeyboardInterrupt):
        finish(first, journal=journal, checkpoint_every=1, progress=stop_after(1))
    file = tmp_path / "run" / "choices.json"
    assert journal.choices() == {"cohort": 2, "threads": 1}
    assert {what.split()[0] for what in first.trainer.choices.asked} == {"forward", "weight_grad"}
    kept = {key: "product" for key in first.trainer.choices.asked}
    file.write_bytes(files.seal({"convolutions": kept, "cohort": 2}))

    second, used = prepared(), []
    algorithm = second.trainer.choices.algorithm

    def noted(*asked):
        used.append((asked[0], algorithm(*asked)))
        return used[-1][1]

    second.trainer.choices.algorithm = noted
    done = finish(second, journal=journal, resume=True)
    assert second.trainer.engine.sizes == [2, 2, 1] * 2  # nothing was tried that does not fit
    assert set(used) == {("forward", "product"), ("weight_grad", "product")}
    assert second.trainer.choices.algorithms == kept
    assert journal.choices() == {"convolutions": kept, "cohort": 2, "threads": 1}
    assert [record["round"] for record in done.history] == [1, 2, 3]
    assert distance(states(whole), states(done)) < 1e-12


# ---- bfloat16 ---------------------------------------------------------------------------------------------------------------
def test_bfloat16_products_keep_weights_and_statistics_in_float32(traced) -> None:
    method, how = fs.PFedSD(lam=0.7, tau=2.0), {"dtype": "float32", "precision": "bf16", "rounds": 2}
    exact = run(method, "convolved", dtype="float32", rounds=2)
    low, stack = run(method, "convolved", **how), run(method, "convolved", engine="stacked", **how)
    for found in (low, stack):
        for state in states(found).values():
            assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())
        assert 1e-6 < distance(states(exact), states(found)) < 2e-2  # 8 bits of precision, and not the same numbers
    assert distance(states(low), states(stack)) < 1e-2
    assert arenas(stack)[0] is not None


def test_bfloat16_reaches_the_products_alone() -> None:
    """Activations between layers are bfloat16; BatchNorm computes, and the logits come, in float32."""
    seen = {}

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.conv(x.reshape(-1, 1, 2, 2))
            normed = self.bn(hidden)
            seen.update(hidden=hidden, normed=normed)
            return self.fc(normed.flatten(1))

    run_ = fs.simulate(
        fs.FedAvg(), model=Watched(), data=ragged(), rounds=1, epochs=1, engine="one", precision="bf16", device="cpu",
        fast=False, workers=1,
    )  # fmt: skip
    net, x = run_.task.net, torch.linspace(-1, 1, 8).reshape(2, 4)
    params = net.initial()
    logits = net(params, x, train=True, key=torch.tensor(0))
    assert seen["hidden"].dtype == seen["normed"].dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    hidden = seen["hidden"].float()
    assert torch.allclose(params["bn.running_mean"], 0.1 * hidden.mean((0, 2, 3)), atol=1e-7)
    assert torch.allclose(params["bn.running_var"], 0.9 + 0.1 * hidden.var((0, 2, 3)), atol=1e-7)


# ---- what tracing leaves behind ---------------------------------------------------------------------------------------------
def test_objects_are_frozen_until_the_trainer_is_closed(traced) -> None:
    assert gc.get_freeze_count() == 0
    trainer, works = trainer_of(fs.FedAvg(), "plain")
    other = trainer.over(trainer.bench)
    list(other.train(1, works([0, 1])))
    assert gc.get_freeze_count() > 1000
    trainer.close()  # those of trainers made by `over`, too
    assert gc.get_freeze_count() == 0


def test_objects_are_not_frozen_for_longer_than_their_trainer_lives(traced) -> None:
    trainer, works = trainer_of(fs.FedAvg(), "plain")
    list(trainer.train(1, works([0, 1])))
    assert gc.get_freeze_count() > 1000
    del trainer, works
    assert gc.get_freeze_count() == 0


def test_runs_side_by_side_leave_nothing_frozen(traced) -> None:
    settings = {**SETTINGS, "engine": "stacked", "rounds": 1, "clients": 3, "partition": "iid", "model": "mlp"}
    fs.run_together([fs.Experiment(method=fs.FedAvg(), **{**settings, "seed": seed}) for seed in (0, 1)])
    assert gc.get_freeze_count() == 0


@dataclass(frozen=True, kw_only=True)
class Slowing(fs.FedAvg):
    """A learning rate that falls from round to round."""

    def phases(self, task: Task) -> tuple[Phase, ...]:
        return (Phase(lr=0.1 / task.round),)


def test_a_program_takes_each_rounds_learning_rate(traced) -> None:
    found = run(Slowing(), "plain", engine="stacked")
    assert distance(states(run(Slowing(), "plain")), states(found)) < 1e-10
    assert [stage is not None for stage in arenas(found)] == [True]
