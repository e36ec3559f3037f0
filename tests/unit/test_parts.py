"""A client's round in two parts: up to the upload, and what trains behind it, against the whole round and a slow loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill.core import tree
from fedstill.core.batch import Batch
from fedstill.core.method import Phase
from fedstill.core.tree import Params, Tree
from fedstill.edge.model_store.store import ModelStore
from fedstill.engine.bench import Bench, Done, Work
from fedstill.engine.pool import Pool
from fedstill.engine.trainer import Trainer
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..laws.table import ROWS
from ..problems import CLASSES, EAGER, SETTINGS, make, ragged, retuned

ROUND, CLIENTS = 2, (3, 0, 2, 1, 4)  # of 10, 13, 1, 7 and 5 samples in batches of 4: 3, 4, 1, 2 and 2 steps an epoch
ODD = (5, 9, 11, 0, 1)  # steps that are no whole epochs, more than the epochs and fewer, none and one

METHODS = {
    "spectral": fs.SpectralCoDistillation(lam_g=0.3, lam_p=0.2, generic_epochs=1, personal_epochs=2),
    "ditto": fs.Ditto(lam=0.7, personal_epochs=3),
    "fedrod": fs.FedRoD(personal_epochs=1),
}
ENGINES = ("one", "pool", "stacked", "traced")
each_method = pytest.mark.parametrize("name", METHODS)
each_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def trainers() -> Iterator[object]:
    """Makes trainers by the engine's name, and ends their workers."""
    made: list[Trainer] = []

    def trainer(method: fs.Method, engine: str = "one", model: str | nn.Module = "normed") -> Trainer:
        how: dict[str, object] = {"engine": "stacked" if engine in ("stacked", "traced") else "one", "workers": 1}
        if engine == "pool":
            how["workers"] = 2
        if engine == "traced":
            how["compile"] = "traced"
        made.append(retuned(prepared(method, model, **how), tuning=EAGER).trainer)
        assert isinstance(made[-1].engine, Pool) == (engine == "pool")
        return made[-1]

    yield trainer
    for one in made:
        one.close()


def prepared(method: fs.Method, model: str | nn.Module = "normed", **changes) -> simulation.Simulation:
    module, head = (make(model), None) if isinstance(model, str) else (model, "2")
    return simulation.prepare(
        method, module, ragged(), head, Training(**{**SETTINGS, "participation": 1.0, "workers": 1, **changes})
    )


def shaken(given: Tree, by: int) -> Tree:
    """The tree with every number moved a little, so that no two clients and no two models are alike."""

    def move(leaf: torch.Tensor) -> torch.Tensor:
        wave = 0.1 * torch.sin(by + 1.0 + torch.arange(leaf.numel(), dtype=torch.float64)).reshape(leaf.shape)
        return leaf + wave.to(leaf.dtype) if leaf.is_floating_point() else leaf.clone()

    return tree.map(move, given)


def works_of(trainer: Trainer) -> list[Work]:
    """Every client's work, from one download and memories that differ."""
    method, task = trainer.bench.method, trainer.bench.task
    start = task.net.initial()
    server = method.init_server(task, start)
    memory = method.init_client(task, start)
    return [Work(k, method.send(task, server, k), shaken(memory, k)) for k in CLIENTS]


def generic(works: list[Work]) -> list[Work]:
    return [replace(work, part="generic") for work in works]


def idle(works: list[Work], done: list[Done], steps: tuple[int, ...]) -> list[Work]:
    return [
        replace(work, part="idle", local=one.local, steps=n) for work, one, n in zip(works, done, steps, strict=True)
    ]


def own_steps(trainer: Trainer) -> tuple[int, ...]:
    """What the background phase takes by its epochs."""
    bench = trainer.bench
    epochs = bench.method.phases(bench.task)[-1].epochs
    sizes = [bench.data.train.sizes[k] for k in CLIENTS]
    return tuple((bench.task.epochs if epochs is None else epochs) * -(-n // 4) for n in sizes)


@functools.cache
def whole(name: str, model: str) -> list[Done]:
    """The whole round, client by client in this process."""
    trainer = prepared(METHODS[name], model, engine="one").trainer
    return list(trainer.train(ROUND, works_of(trainer)))


def gap(a: Tree, b: Tree) -> float:
    """The largest difference; the trees must have the same names."""
    assert tree.outline(a) == tree.outline(b)
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for (_, x), (_, y) in pairs if x.numel()), default=0.0)


def same(a: Tree, b: Tree) -> bool:
    return tree.outline(a) == tree.outline(b) and all(
        torch.equal(x, y) for (_, x), (_, y) in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


# ---- the two parts are the whole ------------------------------------------------------------------------------------------
@each_engine
@each_method
def test_both_parts_are_the_whole_round(name: str, engine: str, trainers, capsys) -> None:
    model = "plain" if engine == "traced" else "normed"
    trainer, right = trainers(METHODS[name], engine, model), whole(name, model)
    works = works_of(trainer)
    first = list(trainer.train(ROUND, generic(works)))
    second = list(trainer.train(ROUND, idle(works, first, own_steps(trainer))))
    if engine == "pool":
        assert len(trainer.engine.pids) == 2
    if engine == "traced":
        (stage,) = trainer.engine.programs.stages.values()  # of the generic phase; the idle part has none
        assert stage is not None
    assert capsys.readouterr().err == ""
    for client, a, b, both in zip(CLIENTS, first, second, right, strict=True):
        assert a.client == b.client == client
        assert a.memory == b.up == b.local == {}
        assert a.samples == b.samples == both.samples
        assert a.steps + b.steps == both.steps
        assert a.finite
        assert b.finite
        assert a.loss * a.steps + b.loss * b.steps == pytest.approx(both.loss * both.steps, abs=1e-10)
        if engine in ("one", "pool"):
            assert same(a.up, both.up)
            assert same(b.memory, both.memory)
        else:
            assert gap(a.up, both.up) < 1e-12
            assert gap(b.memory, both.memory) < 1e-12


@each_method
def test_the_parts_of_a_stack_in_groups_are_those_of_one(name: str, trainers) -> None:
    """Clients of one group of the idle part may come from different groups of the generic one."""
    trainer, right = trainers(METHODS[name], "stacked"), whole(name, "normed")
    works = works_of(trainer)
    trainer.cohort = 2
    first = list(trainer.train(ROUND, generic(works)))
    trainer.cohort = 3
    second = list(trainer.train(ROUND, idle(works, first, own_steps(trainer))))
    assert max(gap(b.memory, both.memory) for b, both in zip(second, right, strict=True)) < 1e-12


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize(
    "method", [fs.FedRoD(personal_head=False), fs.PFedSD(teacher="predictions"), fs.PerFedAvg()], ids=lambda m: m.id
)
def test_without_a_background_phase_the_idle_part_is_the_end_of_the_round(
    method: fs.Method, engine: str, trainers
) -> None:
    trainer = trainers(method, engine)
    works = works_of(trainer)
    right = list(trainer.train(ROUND, works))
    first = list(trainer.train(ROUND, generic(works)))
    second = list(trainer.train(ROUND, idle(works, first, ODD)))
    for a, b, both in zip(first, second, right, strict=True):
        assert (a.steps, b.steps, b.loss) == (both.steps, 0, 0.0)
        assert same(a.up, both.up)
        assert same(b.memory, both.memory)


# ---- any number of steps --------------------------------------------------------------------------------------------------
def slow(bench: Bench, work: Work, local: Tree) -> tuple[Tree, float]:
    """The memory and the mean loss after `work.steps` of the last phase: torch.optim.SGD over the plan's order."""
    method, net, plan = bench.method, bench.task.net, bench.plan
    task = bench.home(ROUND, work.client)
    x, y = bench.data.train.of(work.client)
    phase = method.phases(task)[-1]
    local = tree.clone(phase.enter(task, local) if phase.enter else local)
    start: Params = local[phase.model]
    params = tree.clone(start)
    moves = set(net.names) if phase.moves is None else phase.moves
    moving = [params[n].requires_grad_() for n in net.parameters if n in moves]
    rates = {"lr": SETTINGS["lr"], "momentum": SETTINGS["momentum"]}
    rates |= {n: getattr(phase, n) for n in rates if getattr(phase, n) is not None}
    optimiser = torch.optim.SGD(moving, **rates, weight_decay=SETTINGS["weight_decay"])
    before, losses = tree.clone(params), []
    while len(losses) < work.steps:
        epoch = len(losses) // -(-len(y) // 4)
        for rows in torch.from_numpy(plan.order(ROUND, work.client, len(y), epoch)).split(4):
            if len(losses) == work.steps:
                break
            key = torch.tensor(plan.step_keys(ROUND, work.client, len(losses) + 1)[-1])
            loss = (phase.loss or method.loss)(task, params, local, Batch(x[rows], y[rows], rows, key))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        else:
            if phase.after_epoch is not None:
                with torch.no_grad():
                    for name, value in phase.after_epoch(task, before, params).items():
                        params[name].copy_(value)
                before = tree.clone(params)
    ended = {n: params[n].detach() if n in moves else start[n] for n in start}
    _, kept = method.finish(task, work.down, work.memory, {**local, phase.model: ended})
    return kept, sum(losses) / len(losses) if losses else 0.0


@dataclass(frozen=True, kw_only=True)
class Smoothed(fs.Ditto):
    """A background phase with all that a phase can say."""

    wait_free: ClassVar[bool] = True

    def phases(self, task):
        def enter(task, local):
            return {**local, "v": {n: 0.5 * v if n in task.net.parameters else v for n, v in local["v"].items()}}

        def after(task, before, now):
            return {n: 0.5 * (before[n] + now[n]) for n in task.net.parameters}

        head = frozenset(n for n in task.net.names if n.startswith("head"))
        how = {"moves": head, "enter": enter, "after_epoch": after, "lr": 0.02, "momentum": 0.5}
        return Phase(), Phase(epochs=0, model="v", loss=self.personal_loss, **how)


@each_engine
@pytest.mark.parametrize("method", [*METHODS.values(), Smoothed()], ids=lambda m: type(m).__name__)
def test_any_number_of_steps(method: fs.Method, engine: str, trainers) -> None:
    trainer = trainers(method, engine)
    works = works_of(trainer)
    ends = list(prepared(method, engine="one").trainer.train(ROUND, generic(works)))  # tested above
    for steps in (ODD, (0, 0, 0, 0, 0)):
        asked = idle(works, ends, steps)
        for work, done in zip(asked, trainer.train(ROUND, asked), strict=True):
            kept, loss = slow(trainer.bench, work, work.local)
            assert gap(done.memory, kept) < 1e-12
            assert done.steps == work.steps
            assert done.loss == pytest.approx(loss, abs=1e-12)
            assert done.finite


@pytest.mark.parametrize("engine", ["one", "stacked"])
@each_method
def test_without_a_generic_part_it_goes_on_from_where_the_round_begins(name: str, engine: str, trainers) -> None:
    """For some of the clients, too: the others bring what their generic part left."""
    trainer = trainers(METHODS[name], engine)
    works = works_of(trainer)
    ends = list(trainer.train(ROUND, generic(works)))
    for bring in (False, True):
        brought = [replace(one, local=one.local if bring and one.client % 2 else {}) for one in ends]
        asked = idle(works, brought, ODD)
        for work, done in zip(asked, trainer.train(ROUND, asked), strict=True):
            begun = trainer.bench.method.begin(trainer.bench.home(ROUND, work.client), work.down, work.memory)
            assert gap(done.memory, slow(trainer.bench, work, work.local or begun)[0]) < 1e-12


def test_a_perceptrons_own_loop_breaks_off_an_epoch(trainers) -> None:
    """FedBABU's personal phase has plain cross-entropy, which `fused` trains."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES)).double()
    trainer = trainers(fs.FedBABU(personal_epochs=2), "one", model)
    perceptron = trainer.engine.perceptron
    phase = trainer.bench.method.phases(trainer.bench.task)[-1]
    assert perceptron is not None
    names = trainer.bench.moving(phase)[0]
    assert perceptron.form(trainer.bench.method, trainer.bench.task, {}, phase, names, 8) is not None
    works = works_of(trainer)
    right = list(trainer.train(ROUND, works))
    ends = list(trainer.train(ROUND, generic(works)))
    again = trainer.train(ROUND, idle(works, ends, own_steps(trainer)))
    assert all(same(a.memory, b.memory) for a, b in zip(again, right, strict=True))
    asked = idle(works, ends, ODD)
    for work, done in zip(asked, trainer.train(ROUND, asked), strict=True):
        kept, loss = slow(trainer.bench, work, work.local)
        assert gap(done.memory, kept) < 1e-12
        assert done.loss == pytest.approx(loss, abs=1e-12)


def test_a_client_is_told_the_steps_of_the_whole_round(trainers) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Told(fs.Ditto):
        def begin(self, task, down, memory):
            return {**super().begin(task, down, memory), "steps": 0 + task.here().steps}

        def finish(self, task, down, memory, local):
            up, kept = super().finish(task, down, memory, local)
            return {**up, "steps": local["steps"]}, {**kept, "steps": 0 + task.here().steps}

        def init_client(self, task, params):
            return {**super().init_client(task, params), "steps": tree.scalar_zero(params)}

    for engine in ("one", "stacked"):
        trainer = trainers(Told(personal_epochs=3), engine)
        works = works_of(trainer)
        right = [15, 20, 5, 10, 10]  # of 2 + 3 epochs
        assert [float(done.up["steps"]) for done in trainer.train(ROUND, works)] == right
        ends = list(trainer.train(ROUND, generic(works)))
        assert [float(done.up["steps"]) for done in ends] == right
        assert [float(done.memory["steps"]) for done in trainer.train(ROUND, idle(works, ends, ODD))] == right


# ---- what is kept ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "pool", "stacked"])
@each_method
def test_the_store_is_read_by_both_parts_and_written_by_the_idle_one(name: str, engine: str, trainers) -> None:
    trainer, right = trainers(METHODS[name], engine), whole(name, "normed")
    works = works_of(trainer)
    store = ModelStore(tree.clone(works[0].memory))
    for work in works:
        store.put(work.client, work.memory)
    bare = [replace(work, memory={}) for work in works]
    ends = list(trainer.train(ROUND, generic(bare), store))
    for work, done, both in zip(works, ends, right, strict=True):
        assert same(store.get(work.client), work.memory)
        assert gap(done.up, both.up) < 1e-12
        assert not tree.aliases(done.local, store.get(work.client))
    for work, done in zip(works, trainer.train(ROUND, idle(bare, ends, own_steps(trainer)), store), strict=True):
        assert done.finite
        assert not tree.aliases(done.memory, store.get(work.client))
    for client, both in zip(CLIENTS, right, strict=True):
        assert gap(store.get(client), both.memory) < 1e-12


@pytest.mark.parametrize("engine", ["one", "pool", "stacked"])
@pytest.mark.parametrize("method", [*METHODS.values(), Smoothed()], ids=lambda m: type(m).__name__)
def test_nothing_is_shared(method: fs.Method, engine: str, trainers) -> None:
    """Smoothed keeps entries of its `v` that do not move."""
    trainer = trainers(method, engine)
    works = works_of(trainer)
    given = [(tree.clone(work.down), tree.clone(work.memory)) for work in works]
    ends = list(trainer.train(ROUND, generic(works)))
    asked = idle(works, ends, ODD)
    locals_ = [tree.clone(done.local) for done in ends]
    kept = list(trainer.train(ROUND, asked))
    assert all(same(work.local, local) for work, local in zip(asked, locals_, strict=True))  # read, not written
    others = [{"down": w.down, "memory": w.memory} for w in works] + [{"up": done.up} for done in ends]
    own: list[Tree] = [done.local for done in ends] + [done.memory for done in kept]
    for i, mine in enumerate(own):
        for other in [*others, *own[:i]]:
            assert not tree.aliases(mine, other)
        leaves = tree.flatten(mine)
        for leaf in leaves:
            rest = {name: value for name, value in leaves.items() if name != leaf}
            assert not tree.aliases({leaf: leaves[leaf]}, rest)
    for mine in own:
        for _, leaf in tree.leaves(mine):
            leaf.fill_(7)
    for work, (down, memory) in zip(works, given, strict=True):
        assert same(work.down, down)
        assert same(work.memory, memory)


def test_the_local_of_a_client_that_lacks_a_class_is_no_failure(trainers) -> None:
    """FedRoD's log n is −∞ there: what stays at the client until the idle part does not count as a result."""
    for engine in ("one", "stacked"):
        trainer = trainers(METHODS["fedrod"], engine)
        ends = list(trainer.train(ROUND, generic(works_of(trainer))))
        assert any(torch.isinf(done.local["log_n"]).any() for done in ends)
        assert all(done.finite for done in ends)


# ---- what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "pool", "stacked"])
def test_refusals(engine: str, trainers) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Two(fs.Ditto):
        def phases(self, task):
            generic, personal = super().phases(task)
            return generic, personal, replace(personal, model="anchor")

    trainer = trainers(Two(), engine, "plain")  # in which Ditto's anchor is a whole model
    works = works_of(trainer)
    with pytest.raises(
        ValueError, match=r"ditto has 2 phases of other models than params \(v, anchor\): should be one"
    ):
        list(trainer.train(ROUND, [replace(work, part="idle") for work in works]))
    with pytest.raises(ValueError, match="works of the parts all, generic: should be of one"):
        list(trainer.train(ROUND, [*generic(works[:2]), *works[2:]]))
    with pytest.raises(ValueError, match="steps = -1: should be at least 0"):
        Work(0, {}, part="idle", steps=-1)
    with pytest.raises(ValueError, match="part = 'later': should be one of all, generic, idle"):
        Work(0, {}, part="later")


# ---- what the flag promises ------------------------------------------------------------------------------------------------
WAIT_FREE = [row for row in ROWS if row.method.wait_free]


def test_which_methods_are_wait_free() -> None:
    flagged = {name for name, kind in fs.METHODS.items() if kind.wait_free}
    assert flagged == set(METHODS) == {row.method.id for row in WAIT_FREE}


@pytest.mark.parametrize("row", WAIT_FREE, ids=lambda row: row.name)
def test_what_goes_up_does_not_depend_on_the_background(row, trainers) -> None:
    """From a local whose background phase has not run, and from one whose other models are something else altogether."""
    trainer = trainers(row.method, "one")
    method, task = row.method, trainer.bench.task
    models = [phase.model for phase in method.phases(task)]
    assert models == sorted(models, key=lambda model: model != "params")  # those of others come last
    works = works_of(trainer)
    right, ends = (list(trainer.train(ROUND, asked)) for asked in (works, generic(works)))
    for work, done, both in zip(works, ends, right, strict=True):
        assert same(done.up, both.up)
        home = trainer.bench.home(ROUND, work.client)
        other = {m: shaken(done.local[m], 9) for m in models if m != "params"}
        assert same(method.finish(home, work.down, work.memory, {**done.local, **other})[0], both.up)


def test_a_class_with_other_hooks_must_say_itself_that_it_is_wait_free() -> None:
    def derived(*bases: type, **names: object) -> type[fs.Method]:
        return dataclass(frozen=True, kw_only=True)(type("Derived", bases, names))

    def hook(self, *given):
        return given

    class Mixed:
        finish = hook

    for name in ("begin", "phases", "step", "finish"):
        assert not derived(fs.Ditto, **{name: hook}).wait_free
        assert derived(fs.Ditto, **{name: hook}, wait_free=True).wait_free
        assert not derived(derived(fs.Ditto, **{name: hook})).wait_free
    assert derived(fs.Ditto).wait_free
    assert derived(fs.Ditto, fit=hook, merge=hook, personal=hook).wait_free
    assert not derived(Mixed, fs.Ditto).wait_free
    assert not derived(fs.FedAvg, phases=hook).wait_free
