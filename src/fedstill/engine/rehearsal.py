"""A rehearsal: every hook of a method of one's own is called once, on a few samples, before any work.

Both engines' own code is used, so what would fail in a round fails here and is named with the hook and the remedy (`hooks`).
Besides, values are compared before and after each call, so that a change in place is found where autograd and version counters
do not see it, and what hooks return is checked. Training itself pays nothing for it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import tree
from ..core.batch import Batch
from ..core.errors import HookError, InputError, TrainingError
from ..core.method import Method, Phase, Upload
from ..core.plan import JointPlan, Length
from ..core.settings import values_of
from ..core.task import Task
from ..core.tree import Params, Tree, put
from ..data.samples import Part, Samples, Splits
from .bench import Bench, EngineName, Work
from .calls import (
    UNCHANGED,
    Calls,
    check_functions,
    check_loss,
    check_memory,
    check_model,
    check_private,
    check_tree,
    name_of,
    named,
    wrong,
)
from .hooks import changes_arguments
from .one import run_phase
from .stacked import Cohort
from .stage import say
from .step import check_begun, explained

MOST = 4  # samples of a client
_rehearsed: weakref.WeakKeyDictionary[type, dict[Any, EngineName]] = weakref.WeakKeyDictionary()
"""The engine that can train a method, of what has been rehearsed in this process: by its class, then by all else that counts."""


def is_own(method: Method) -> bool:
    """Return whether a method is somebody's own, and not one of fedstill's."""
    return type(method).__module__.partition(".")[0] != __name__.partition(".")[0]


def rehearse(bench: Bench, engine: EngineName, together: int = 2, asked: bool = True) -> EngineName:
    """Call every hook once, as `engine` would; return the engine that can train the method. `merge` gets `together` uploads.

    Raises `HookError` for a mistake. What can be trained one by one alone is an error where the engine `stacked` was `asked` for,
    and otherwise said in a line. The same method and model are rehearsed once in a process.
    """
    small = _small(bench)
    if small is None:
        return engine
    known, key = _rehearsed.setdefault(type(bench.method), {}), (engine, together, asked, *_form(bench))
    if key not in known:
        known[key] = _rehearse(small, engine, together, asked)
    return known[key]


def _form(bench: Bench) -> tuple[Any, ...]:
    """Return all that the outcome of a rehearsal depends on, but for the method's class."""
    net, task = bench.net, bench.task
    model = type(net.module), *((name, value.shape, value.dtype) for name, value in net.initial().items())
    settings = task.objective, task.recipe, task.augment, task.split, task.clients, bench.plan.batch_size
    return repr(values_of(bench.method)), model, repr(settings), str(net.device), task.private is None


def _rehearse(small: Bench, engine: EngineName, together: int, asked: bool) -> EngineName:
    try:
        round = _one_by_one(small, together)
        if engine == "one" or small.task.private is not None:
            return engine
        with explained(small.method, small.task, stacked=True):
            _stacked(small, round)
    except (MemoryError, torch.cuda.OutOfMemoryError):  # training itself may fit
        return engine
    except HookError:
        raise
    except (TrainingError, InputError) as error:
        if isinstance(error, InputError) and (asked or error.field != "engine"):
            raise
        if asked or changes_arguments(error):
            raise HookError(str(error)) from error
        say(f"clients can be trained one by one only: {error}")
        return "one"
    return engine


def _one_by_one(bench: Bench, together: int) -> Round:
    try:
        return _alone(bench, together)
    except TrainingError as error:
        raise HookError(str(error)) from error


def _small(bench: Bench) -> Bench | None:
    """Return the bench with the two clients that have the fewest samples; None where this process holds no samples."""
    train = bench.data.train
    held = [k for k, size in enumerate(train.sizes) if size and (train.held is None or k in train.held)]
    chosen = sorted(held, key=lambda k: train.sizes[k])[:2][::-1]
    if not chosen:
        return None
    sizes = tuple(min(MOST, train.sizes[k]) for k in chosen)
    rows = [slice(train.starts[k], train.starts[k] + n) for k, n in zip(chosen, sizes, strict=True)]
    x, y = torch.cat([train.x[r] for r in rows]), torch.cat([train.y[r] for r in rows])
    part = Part(Samples(x), y, tuple(sum(sizes[:i]) for i in range(len(sizes))), sizes)
    plan = bench.plan.plans[0] if isinstance(bench.plan, JointPlan) else bench.plan
    task = dataclasses.replace(bench.task, average=tree.mean, private=None, rounds=max(2, bench.task.rounds))
    return dataclasses.replace(
        bench, task=task, data=Splits(part, part), plan=JointPlan((plan,), len(sizes)), hidden=None, varied={}
    )


@dataclass(frozen=True)
class Round:
    """What the second round begins with."""

    downs: Sequence[Tree]
    memories: Sequence[Tree]
    last: Sequence[int]


# ---- one by one ----------------------------------------------------------------------------------------------------------
def _alone(bench: Bench, together: int) -> Round:
    """Carry out two rounds, the first with one of the clients; return what the second began with."""
    method, task, calls = bench.method, dataclasses.replace(bench.task, round=1), Calls(bench.method)
    clients = range(len(bench.data.train.sizes))
    with explained(method, task, stacked=False):
        phases = method.phases(task)
        if not isinstance(phases, tuple | list) or not all(isinstance(phase, Phase) for phase in phases):
            raise wrong(method, "phases", phases, "It should return a tuple of fedstill.Phase")
        for number, phase in enumerate(phases, start=1):
            check_functions(method, number, phase)
        initial = bench.net.initial()
        check_private(bench, method.private(task), initial)
        server = calls.tree("init_server", lambda: method.init_server(task, initial), params=initial)
        memories = [
            calls.tree("init_client", lambda: method.init_client(task, initial), params=initial) for _ in clients
        ]
        down = _send(calls, task, server, 0)
        up, memories[0] = _client(bench, calls, 1, 0, 0, down, memories[0])
        uploads = [Upload(up, float(bench.data.train.sizes[0]), 0, down)]
        server = _merged(calls, task, server, uploads, together)
        task = dataclasses.replace(task, round=2)
        second = Round([_send(calls, task, server, k) for k in clients], memories, [1, 0][: len(clients)])
        uploads = []
        for k, (down, memory, last) in enumerate(zip(second.downs, memories, second.last, strict=True)):
            up, after = _client(bench, calls, 2, k, last, down, memory)
            uploads.append(Upload(up, float(bench.data.train.sizes[k]), k, down))
            _score(bench, calls, k, down, after, initial)
        server = _merged(calls, task, server, uploads, together)
        generic = calls.tree("generic", lambda: method.generic(task, server), server=server)
        check_model(method, "generic", generic, initial)
    return second


def _send(calls: Calls, task: Task, server: Tree, client: int) -> Tree:
    return calls.tree("send", lambda: calls.method.send(task, server, client), server=server)


def _merged(calls: Calls, task: Task, server: Tree, uploads: list[Upload], together: int) -> Tree:
    """Merge as many uploads as a round has: these, and copies of them from other clients."""
    sent = {f"uploads[{k}].tree": upload.tree for k, upload in enumerate(uploads)}
    sent |= {f"uploads[{k}].down": upload.down for k, upload in enumerate(uploads)}
    count, more = len(uploads), range(len(uploads), min(together, task.clients))
    given = uploads + [dataclasses.replace(uploads[k % count], client=k) for k in more]
    before = tuple(given)
    after = calls.tree("merge", lambda: calls.method.merge(task, server, given), server=server, **sent)
    if len(given) != len(before) or any(a is not b for a, b in zip(given, before, strict=True)):
        raise TrainingError(f"{name_of(calls.method, 'merge')} changed its argument uploads in place. {UNCHANGED}")
    return after


def _score(bench: Bench, calls: Calls, client: int, down: Tree, memory: Tree, initial: Params) -> None:
    """Ask for a client's own model."""
    method, home = calls.method, bench.home(2, client, 2)
    with torch.no_grad():
        model = calls.tree("personal", lambda: method.personal(home, down, memory), down=down, memory=memory)
    check_model(method, "personal", model, initial)


def _client(
    bench: Bench, calls: Calls, round: int, client: int, last: int, down: Tree, memory: Tree
) -> tuple[Tree, Tree]:
    """Carry out a client's round, with a step in each phase; return its upload and its new memory."""
    method, task, size = calls.method, bench.home(round, client, last), bench.data.train.sizes[client]
    memory = tree.fit_rows(memory, method.per_sample, size)
    with torch.no_grad():
        local = calls.tree("begin", lambda: method.begin(task, down, memory), down=down, memory=memory)
    parts = bench.part("all", round)
    check_begun(method, [phase.model for _, phase, _ in parts if method.step is None], local)
    total = torch.zeros((), dtype=bench.net.dtype, device=task.here().y.device)
    for number, phase, _ in parts:
        with torch.enable_grad():
            _try_phase(bench, calls, task, phase, local, _batch(bench, round, client))
            steps = _length(phase).of(size, bench.plan.batch_size)
            local, _ = run_phase(bench, task, round, client, local, phase, steps, total, None, number)
    with torch.no_grad():
        ended = calls("finish", lambda: method.finish(task, down, memory, local), down=down, memory=memory, local=local)
    if not isinstance(ended, tuple | list) or len(ended) != 2:
        raise wrong(method, "finish", ended, "It should return two trees, (upload, memory)")
    up, kept = (check_tree(method, "finish", value) for value in ended)
    check_memory(method, memory, kept)
    return up, kept


def _try_phase(bench: Bench, calls: Calls, task: Task, phase: Phase, local: Tree, batch: Batch) -> None:
    """Call a phase's functions and `correct`, or the method's own step, by themselves."""
    method = calls.method
    if method.step is not None:
        step = method.step
        ended = calls("step", lambda: step(task, local, batch), local=local)
        if not isinstance(ended, tuple | list) or len(ended) != 2:
            raise wrong(method, "step", ended, "It should return (local, loss)")
        check_loss(method, "step", ended[1], "It should return (local, loss), the loss one number")
        return
    loss = phase.loss or method.loss
    if phase.enter is not None:
        enter = phase.enter
        with torch.no_grad():
            local = calls.tree("enter", lambda: enter(task, local), local=local)
    name = "loss" if phase.loss is None else named(phase.loss, "loss")
    model = tree.clone(local[phase.model])
    fixed = {entry: value for entry, value in model.items() if entry not in bench.net.buffers}  # which training changes
    value = calls(name, lambda: loss(task, model, local, batch), params=fixed, local=local)
    check_loss(method, name, value, "It should return one number, a function of params")
    with torch.no_grad():
        weights = {entry: model[entry] for entry in bench.moving(phase)[0] if entry in model}
        if weights and type(method).correct is not Method.correct:
            grads = tree.clone(weights)  # any numbers will do, and these cost no pass
            calls("correct", lambda: method.correct(task, local, grads), local=local, grads=grads)
        if phase.after_epoch is not None:
            smooth, before, after = phase.after_epoch, tree.clone(model), tree.clone(model)
            name = named(smooth, "after_epoch")
            calls.tree(name, lambda: smooth(task, before, after), before=before, after=after)


def _batch(bench: Bench, round: int, client: int) -> Batch:
    """Return a batch as training sees it."""
    x, y = bench.data.train.of(client)
    rows = torch.arange(min(bench.plan.batch_size, len(y)), device=y.device)
    (key,) = put(bench.plan.step_keys(round, client, 1), y.device)
    return bench.task.augmented(Batch(x[rows], y[rows], rows, key))


def _length(phase: Phase) -> Length:
    """Return one step, or an epoch where something happens at its end."""
    return Length(1) if phase.after_epoch is not None else Length(0, 1)


# ---- stacked -------------------------------------------------------------------------------------------------------------
def _stacked(bench: Bench, round: Round) -> None:
    """Carry out the second round for both clients at once."""
    each = zip(round.downs, round.memories, round.last, strict=True)
    works = [Work(k, down, memory, last=last) for k, (down, memory, last) in enumerate(each)]
    cohort = Cohort(bench, 2, works)
    with torch.enable_grad():
        local = cohort.begin()
        for number, phase, _ in cohort.phases:
            if phase.enter is not None and bench.method.step is None:
                local = cohort.enter(number, local)
            local = cohort.run(number, phase, _length(phase), local)
        cohort.finish(local)
