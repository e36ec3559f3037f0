"""A rehearsal: every hook of a method of one's own is called once, on a few samples, before any work.

Both engines' own code is used, so what would fail in a round fails here and is named with the hook and the remedy (`hooks`).
Besides, values are compared before and after each call, so that a change in place is found where autograd and version counters
do not see it, and what hooks return is checked. Training itself pays nothing for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.errors import HookError, InputError, TrainingError
from ..core.method import Method, Phase, Upload
from ..core.plan import JointPlan, Length
from ..core.task import Task
from ..core.tree import Params, Tree, put
from ..data.samples import Part, Samples, Splits
from . import stackable
from .bench import Bench, EngineName, Work
from .hooks import reads_values
from .one import run_phase
from .stacked import Cohort
from .stage import say
from .step import check_begun, explained

MOST = 16  # samples of a client
TREE = "It should return a tree: a dictionary whose values are tensors or such dictionaries"


def is_own(method: Method) -> bool:
    """Return whether a method is somebody's own, and not one of fedstill's."""
    return type(method).__module__.partition(".")[0] != __name__.partition(".")[0]


def rehearse(bench: Bench, engine: EngineName) -> EngineName:
    """Call every hook once; return the engine that can train the method.

    Raises `HookError` for a mistake. What can be trained one by one alone is said in a line with the engine `one`, and otherwise
    an error if a hook reads a tensor's value.
    """
    small = _small(bench)
    if small is None:
        return engine
    try:
        round = _one_by_one(small)
        if bench.task.private is not None or stackable.refusal(small) is not None:
            return engine
        with explained(bench.method, small.task, stacked=True):
            _stacked(small, round)
    except (MemoryError, torch.cuda.OutOfMemoryError):  # training itself may fit
        return engine
    except HookError:
        raise
    except (TrainingError, InputError) as error:
        if isinstance(error, InputError) and (error.field != "engine" or engine == "stacked"):
            raise
        if engine == "stacked" or (engine == "auto" and reads_values(error)):
            raise HookError(str(error)) from error
        say(f"clients can be trained one by one only: {error}")
        return "one"
    return engine


def _one_by_one(bench: Bench) -> Round:
    try:
        return _alone(bench)
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
def _alone(bench: Bench) -> Round:
    """Carry out two rounds, the first with one of the clients; return what the second began with."""
    method, task, calls = bench.method, dataclasses.replace(bench.task, round=1), Calls(bench.method)
    clients = range(len(bench.data.train.sizes))
    with explained(method, task, stacked=False):
        phases = method.phases(task)
        if not isinstance(phases, tuple | list) or not all(isinstance(phase, Phase) for phase in phases):
            raise _wrong(method, "phases", phases, "It should return a tuple of fedstill.Phase")
        initial = bench.net.initial()
        server = calls.tree("init_server", lambda: method.init_server(task, initial), params=initial)
        memories = [
            calls.tree("init_client", lambda: method.init_client(task, initial), params=initial) for _ in clients
        ]
        down = _send(calls, task, server, 0)
        up, memories[0] = _client(bench, calls, 1, 0, 0, down, memories[0])
        server = _merged(calls, task, server, [Upload(up, float(bench.data.train.sizes[0]), 0, down)])
        task = dataclasses.replace(task, round=2)
        second = Round([_send(calls, task, server, k) for k in clients], memories, [1, 0][: len(clients)])
        uploads = []
        for k, (down, memory, last) in enumerate(zip(second.downs, memories, second.last, strict=True)):
            up, after = _client(bench, calls, 2, k, last, down, memory)
            uploads.append(Upload(up, float(bench.data.train.sizes[k]), k, down))
            _score(bench, calls, k, down, after, initial)
        server = _merged(calls, task, server, uploads)
        generic = calls.tree("generic", lambda: method.generic(task, server), server=server)
        _check_model(method, "generic", generic, initial)
    return second


def _send(calls: Calls, task: Task, server: Tree, client: int) -> Tree:
    return calls.tree("send", lambda: calls.method.send(task, server, client), server=server)


def _merged(calls: Calls, task: Task, server: Tree, uploads: list[Upload]) -> Tree:
    sent = {f"upload {upload.client}": upload.tree for upload in uploads}
    return calls.tree("merge", lambda: calls.method.merge(task, server, uploads), server=server, **sent)


def _score(bench: Bench, calls: Calls, client: int, down: Tree, memory: Tree, initial: Params) -> None:
    """Ask for a client's own model."""
    method, home = calls.method, bench.home(2, client, 2)
    with torch.no_grad():
        model = calls.tree("personal", lambda: method.personal(home, down, memory), down=down, memory=memory)
    _check_model(method, "personal", model, initial)


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
            _try_loss(bench, calls, task, phase, local, _batch(bench, round, client))
            steps = _length(phase).of(size, bench.plan.batch_size)
            local, _ = run_phase(bench, task, round, client, local, phase, steps, total, None, number)
    with torch.no_grad():
        ended = calls("finish", lambda: method.finish(task, down, memory, local), down=down, memory=memory, local=local)
    if not isinstance(ended, tuple | list) or len(ended) != 2:
        raise _wrong(method, "finish", ended, "It should return two trees, (upload, memory)")
    up, kept = (_check_tree(method, "finish", value) for value in ended)
    _check_memory(method, memory, kept)
    return up, kept


def _try_loss(bench: Bench, calls: Calls, task: Task, phase: Phase, local: Tree, batch: Batch) -> None:
    """Call a phase's loss, or the method's own step, by itself."""
    method = calls.method
    if method.step is not None:
        step = method.step
        ended = calls("step", lambda: step(task, local, batch), local=local)
        if not isinstance(ended, tuple | list) or len(ended) != 2:
            raise _wrong(method, "step", ended, "It should return (local, loss)")
        _check_loss(method, "step", ended[1], "It should return (local, loss), the loss one number")
        return
    loss = phase.loss or method.loss
    if phase.enter is not None:
        enter = phase.enter
        with torch.no_grad():
            local = calls.tree("enter", lambda: enter(task, local), local=local)
    name = "loss" if phase.loss is None else getattr(phase.loss, "__name__", "loss")
    model = tree.clone(local[phase.model])
    fixed = {entry: value for entry, value in model.items() if entry not in bench.net.buffers}  # which training changes
    value = calls(name, lambda: loss(task, model, local, batch), params=fixed, local=local)
    _check_loss(method, name, value, "It should return one number, a function of params")


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


# ---- what hooks change and return ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Calls:
    """Calls hooks and compares their arguments before and after."""

    method: Method

    def __call__(self, hook: str, call: Callable[[], Any], **arguments: Tree) -> Any:
        """Return what a hook returns; refuse one that changes an argument."""
        before = {name: tree.flatten(tree.clone(argument)) for name, argument in arguments.items()}
        value = call()
        for name, argument in arguments.items():
            now = tree.flatten(argument)
            changed = [leaf for leaf, old in before[name].items() if leaf not in now or not _same(old, now[leaf])]
            changed += [leaf for leaf in now if leaf not in before[name]]
            if changed:
                where = name + "".join(f"[{key!r}]" for key in changed[0].split(tree.SEPARATOR))
                right = (
                    "A hook must return new tensors (x = x + y, not x += y) and new dictionaries ({**tree, name: x})"
                )
                raise TrainingError(f"{_name(self.method, hook)} changed its argument {where} in place. {right}")
        return value

    def tree(self, hook: str, call: Callable[[], Any], **arguments: Tree) -> Tree:
        """Return the tree that a hook returns."""
        return _check_tree(self.method, hook, self(hook, call, **arguments))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _check_tree(method: Method, hook: str, value: Any) -> Tree:
    """Refuse what is no tree of tensors."""
    if not isinstance(value, dict):
        raise _wrong(method, hook, value, TREE)
    for name, entry in value.items():
        if not isinstance(name, str):
            raise _wrong(method, hook, name, f"{TREE}, by name")
        if isinstance(entry, dict):
            _check_tree(method, hook, entry)
        elif not isinstance(entry, Tensor):
            raise _wrong(method, hook, entry, TREE, f" as {name!r}")
    return value


def _check_loss(method: Method, hook: str, value: Any, right: str) -> None:
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        raise _wrong(method, hook, value, right)


def _check_model(method: Method, hook: str, model: Tree, initial: Params) -> None:
    """Refuse a model whose entries are not those of the model that is trained."""
    for name, entry in initial.items():
        if name not in model:
            raise TrainingError(
                f"{_name(method, hook)} returned no {name!r}. It should return every entry of the model"
            )
        if not isinstance(model[name], Tensor) or model[name].shape != entry.shape:
            raise _wrong(method, hook, model[name], f"It should be of the shape {_shape(entry)}", f" as {name!r}")
    others = [name for name in model if name not in initial]
    if others:
        raise TrainingError(f"{_name(method, hook)} returned {others[0]!r}. It should return the model's entries alone")


def _check_memory(method: Method, before: Tree, after: Tree) -> None:
    """Refuse a memory with other names, shapes or types than it had."""
    old, new = tree.flatten(before), tree.flatten(after)
    right = (
        "A memory has one form for every client and round: init_client returns it with zeros where nothing is known yet"
    )
    for name in [*old, *new]:
        entry = name.replace(tree.SEPARATOR, "/")
        if name not in new or name not in old:
            what = "leaves out" if name in old else "adds"
            raise TrainingError(f"{_name(method, 'finish')} {what} {entry!r} of the memory. {right}")
        rows = 1 if name.split(tree.SEPARATOR)[0] in method.per_sample else 0
        a, b = old[name], new[name]
        if a.shape[rows:] != b.shape[rows:] or a.ndim != b.ndim or a.dtype != b.dtype:
            what = f"gives the memory's {entry!r} as {_shape(b)} {b.dtype}, which was {_shape(a)} {a.dtype}"
            raise TrainingError(f"{_name(method, 'finish')} {what}. {right}")


def _wrong(method: Method, hook: str, value: Any, right: str, where: str = "") -> TrainingError:
    shown = f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    if isinstance(value, tuple | list):
        shown += f" of {len(value)}"
    elif isinstance(value, dict):
        shown = f"one tree ({', '.join(map(str, value)) or 'empty'})"
    return TrainingError(f"{_name(method, hook)} returned {shown}{where}. {right}")


def _shape(value: Tensor) -> str:
    return "×".join(map(str, value.shape)) or "one number"


def _name(method: Method, hook: str) -> str:
    return f"{type(method).__name__}.{hook}()"
