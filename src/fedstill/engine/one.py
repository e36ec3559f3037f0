"""The engine `one`: each client in turn, no padding, updates in place. Fast on a CPU, and the oracle for `stacked`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.closed import Envelope
from ..core.method import Method, Phase
from ..core.metric import Tally
from ..core.optim import SGD
from ..core.task import CHUNK, Task
from ..core.tree import Params, Tree, put
from ..data.samples import batches_at_once
from .bench import Bench, Done, Work, results_of
from .fused import Perceptron
from .hooks import calls
from .kept import KEPT, with_kept
from .malloc import keep_freed_memory
from .progress import Course
from .step import Step, by_autograd, check_begun, check_unchanged, explained, versions


class One:
    """Trains clients one after another."""

    def __init__(self, perceptron: Perceptron | None = None) -> None:
        """`perceptron` is the model's own loop, where it has one."""
        self.perceptron = perceptron

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""
        keep_freed_memory()
        with torch.enable_grad():
            for work in works:
                with explained(bench.method, bench.task, stacked=False):
                    done = _train(bench, round, work, self.perceptron)
                yield done

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the sum of the scores of each client's samples."""
        found = []
        for client, params in models:
            x, y = bench.data.part(part).of(client)
            found.append(bench.task.objective.score(bench.task.predict(params, x), y).sum())
        return torch.stack(found).tolist() if found else []

    def measure(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[tuple[float, Tree]]:
        """Return the sum of the scores of each client's samples, and the statistics of its metrics."""
        found = []
        for client, params in models:
            x, y = bench.data.part(part).of(client)
            tally = Tally(bench.measures)
            for rows in torch.split(torch.arange(len(y), device=y.device), CHUNK):
                tally.add(bench.task.predict(params, x[rows]), y[rows])
            found.append(tally.done())
        return found

    def losses(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the mean loss of each client's model on the client's samples, in evaluation mode."""
        found = []
        for client, params in models:
            x, y = bench.data.part(part).of(client)
            outputs = bench.task.predict(params, x).double()
            losses = bench.task.objective.plain_losses(outputs, y.double() if y.is_floating_point() else y)
            found.append(losses.mean())
        return [float(loss) for loss in torch.stack(found).tolist()] if found else []


def _train(bench: Bench, round: int, work: Work, perceptron: Perceptron | None) -> Done:
    method, task = bench.method, bench.home(round, work.client, work.last)
    phases = [(number, phase, bench.length(work, length)) for number, phase, length in bench.part(work.part, round)]
    steps = sum(count for _, _, count in phases)
    x, y = task.here().x, task.here().y
    if bench.hidden is not None and task.private is not None:
        noisy = sum(count for _, phase, count in phases if bench.private(phase))
        secret = bench.hidden.of(round, work, len(y), noisy)
        task = dataclasses.replace(task, private=dataclasses.replace(task.private, secret=secret))
    whole = tree.fit_rows(work.memory, method.per_sample, len(y))
    memory, kept = tree.without(whole, KEPT), dict[str, Tree]()  # of the phases that have ended
    local, arguments = work.local if work.part == "idle" else {}, versions(down=work.down, memory=memory)
    total = torch.zeros((), dtype=bench.net.dtype, device=x.device)
    halfway = None if work.savepoint is None else work.savepoint.load()
    if halfway is not None:
        local = halfway.state["local"]
        total += halfway.state["total"]
        kept |= halfway.state.get("kept", {})
    if not local:
        with torch.no_grad():
            local = method.begin(task, work.down, memory)
        check_begun(method, [phase.model for _, phase, _ in phases if method.step is None], local)
        check_unchanged(method, "begin", arguments)
    for number, phase, count in phases:
        course = None
        if work.savepoint is not None:
            if halfway is not None and number < halfway.phase:
                continue
            here = halfway if halfway is not None and number == halfway.phase else None
            per_epoch, last = bench.plan.steps(len(y), 1), number == phases[-1][0]
            course = Course(work.savepoint, number, count, per_epoch, last, here, kept)
        before, past = versions(local=local), whole.get(KEPT, {}).get(str(number))
        local, state = run_phase(
            bench, task, round, work.client, local, phase, count, total, perceptron, number, course, past
        )
        if past is not None:
            kept[str(number)] = tree.to(state, x.device)
        check_unchanged(method, "loss" if method.step is None else "step", before)
    arguments += versions(local=local)
    up, memory = _finish(method, task, work.down, memory, local)
    check_unchanged(method, "finish", arguments)
    memory = with_kept(memory, whole, kept) if KEPT in whole else memory
    up, memory, local = results_of(work.part, up, memory, local, method.phases(task)[-1].model if work.watch else "")
    return Done(work.client, up, memory, float(total) / max(1, steps), steps, len(y), local=local)


@calls("finish")
def _finish(method: Method, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
    with torch.no_grad():
        up, memory = method.finish(task, down, memory, local)
    return up, memory


def run_phase(
    bench: Bench,
    task: Task,
    round: int,
    client: int,
    local: Tree,
    phase: Phase,
    steps: int,
    total: Tensor,
    perceptron: Perceptron | None,
    number: int = 0,
    course: Course | None = None,
    kept: Tree | None = None,
) -> tuple[Tree, Tree]:
    """Train one phase (`number` among the method's) of one client for so many steps; add every step's loss to `total`.

    Return `local` and the optimiser's state after the phase. With a `course` the phase begins where it was interrupted, and its
    state is kept from time to time. `kept` is the optimiser's state of the client's last round; None: it starts afresh.
    """
    method = bench.method
    done = 0 if course is None else course.done
    if phase.enter is not None and not done and method.step is None:
        with torch.no_grad():
            local = phase.enter(task, local)
    if perceptron is not None and phase.model in local:
        start: Params = local[phase.model]
        names = [name for name in bench.moving(phase)[0] if name in start]
        size = min(bench.plan.batch_size, bench.data.train.sizes[client])
        form = perceptron.form(method, task, local, phase, names, size)
        if form is not None:
            place, sgd = (
                None if course is None else (course, {"local": local, "total": total}),
                task.optimizer_of(phase),
            )
            assert isinstance(sgd, SGD)
            orders, keys = _orders(bench, round, client, steps, done), bench.plan.step_keys(round, client, steps)
            trained, loss, inner = perceptron.train(
                start,
                names,
                sgd,
                *bench.data.train.of(client),
                orders,
                size,
                place,
                form,
                torch.from_numpy(keys),
            )
            total += loss
            between = {form.nested.model: {**start, **inner}} if isinstance(form.nested, Envelope) else {}
            return {**local, phase.model: trained, **between}, {}
    if method.step is not None:
        step = Step(method, task, phase.loss or method.loss, phase.model != "params")
        factors = task.recipe.factors(steps)
        for count, batch in enumerate(_batches(bench, round, client, steps, done), start=done + 1):
            local, loss = step.own(local, batch, task.lr * factors[count - 1] if factors else None)
            total += loss
            if course is not None and course.due(count):
                course.save(count, {"local": local, "total": total})
        return local, {}
    past = course.halfway.state if course is not None and course.halfway is not None else {}
    training = PhaseTraining(bench, task, local, phase, done, past, kept, steps)
    drawn = (
        _private_batches(bench, task, round, number, client, steps, done)
        if bench.private(phase)
        else _batches(bench, round, client, steps, done)
    )
    for batch in drawn:
        total += training.step(batch)
        if course is not None and course.due(training.steps):
            course.save(training.steps, {"local": local, "total": total, **training.state_dict()})
    return {**local, phase.model: training.trained()}, training.optimizer_state


class PhaseTraining:
    """One phase of one client's work by automatic differentiation, step by step."""

    def __init__(
        self,
        bench: Bench,
        task: Task,
        local: Tree,
        phase: Phase,
        steps: int = 0,
        past: Tree | None = None,
        kept: Tree | None = None,
        length: int = 0,
    ) -> None:
        """Begin with `local`, or after so many steps with `past`, what `state_dict` returned then.

        `kept` is the optimiser's state to begin with, if not afresh; `length` the phase's steps, for a schedule over them.
        """
        self.task, self.local, self.phase, self.steps = task, local, phase, steps
        net, past = task.net, past or {}
        self._start: Params = local[phase.model]
        moving, moving_buffers = bench.moving(phase)
        self._names = [name for name in moving if name in self._start]
        self._moved = {*self._names, *moving_buffers}
        self._params = params = {
            name: net.fast_layout(value.detach()).clone(memory_format=torch.preserve_format)
            for name, value in self._start.items()
        }
        for name, value in past.get("params", {}).items():
            params[name].copy_(value)
        self._weights = {name: params[name].requires_grad_() for name in self._names}
        self._buffers = {name: params[name] for name in net.buffers if name in params}
        self._fixed = {n: v for n, v in params.items() if n not in self._weights and n not in self._buffers}
        self._optimizer = task.optimizer_of(phase)
        self.optimizer_state = self._optimizer.init(self._weights) if self._weights else {}
        for state in (kept, past.get("optimizer")):
            tree.map(lambda own, value: own.copy_(value), self.optimizer_state if state else {}, state or {})
        self._rates = [self._optimizer.lr * factor for factor in task.recipe.factors(length)]
        self._before = tree.clone(params) if phase.after_epoch is not None else params
        for name, value in past.get("before", {}).items():
            self._before[name].copy_(value)
        self._step = Step(bench.method, task, phase.loss or bench.method.loss, phase.model != "params")
        self._per_epoch = bench.plan.steps(len(task.here().y), 1)

    def step(self, batch: Batch) -> Tensor:
        """Make a step; return its loss."""
        grads, loss, _ = self._step.gradient(by_autograd, self._weights, self._buffers, self._fixed, self.local, batch)
        if grads:
            rate = self._rates[self.steps] if self._rates else None
            self._optimizer.update(self._weights, grads, self.optimizer_state, rate)
        self.steps += 1
        if self.phase.after_epoch is not None and self.steps % self._per_epoch == 0:
            with torch.no_grad():
                for name, value in self.phase.after_epoch(self.task, self._before, self._params).items():
                    self._params[name].copy_(value)
                self._before = tree.clone(self._params)
        return loss

    def state_dict(self) -> Tree:
        """Return what the steps so far have changed, for a savepoint; later steps change it in place."""
        return {
            "params": {name: value.detach() for name, value in self._params.items() if name in self._moved},
            "optimizer": self.optimizer_state,
            "before": self._before if self.phase.after_epoch is not None else {},
        }

    def trained(self) -> Params:
        """Return the model after the steps so far; later steps may change it in place."""
        # Contiguous again: what leaves the engine is laid out the same whether it came from here, the wire or a checkpoint.
        params, names = self._params, self.task.net.names
        return {
            n: params[n].detach().contiguous() if n in self._moved else self._start[n] for n in names if n in params
        }


def _batches(bench: Bench, round: int, client: int, steps: int, done: int = 0) -> Iterator[Batch]:
    """Yield the client's first batches of a round but for those that are `done`: one gather per epoch, then slices of it.

    Samples in a file are gathered a batch at a time, or a few.
    """
    x, y = bench.data.train.of(client)
    size, per_epoch = min(bench.plan.batch_size, len(y)), bench.plan.steps(len(y), 1)
    step = done - done % per_epoch
    keys = put(bench.plan.step_keys(round, client, steps), x.device)
    together = size * batches_at_once(x, size, len(y))
    for order in _orders(bench, round, client, steps, done):
        for index in torch.split(order, together):
            xs, ys = x[index], y[index]
            for first in range(0, len(index), size):
                rows = slice(first, first + size)
                if step >= done:
                    yield Batch(xs[rows], ys[rows], index[rows], keys[step])
                step += 1


def _private_batches(
    bench: Bench, task: Task, round: int, phase: int, client: int, steps: int, done: int
) -> Iterator[Batch]:
    """Yield the batches of a phase of DP-SGD; of a batch without samples nothing but its noise is left."""
    x, y = bench.data.train.of(client)
    secret = None if task.private is None else task.private.secret
    if secret is None:
        drawn, noise = bench.plan.private(round, phase, client, len(y), steps)
    else:
        drawn, noise = secret.private(phase, len(y), steps, bench.plan.batch_size)
    for rows, key in zip(drawn[done:], put(noise[done:], x.device), strict=True):
        index = put(rows if len(rows) else [0], x.device)
        yield Batch(
            x[index],
            y[index],
            index,
            key,
            None if len(rows) else torch.zeros(1, dtype=bench.net.dtype, device=x.device),
        )


def _orders(bench: Bench, round: int, client: int, steps: int, done: int = 0) -> Iterator[Tensor]:
    """Yield the order of the client's samples, epoch by epoch from that of the step `done` on; the last ends with the steps."""
    x, y = bench.data.train.of(client)
    size, per_epoch = min(bench.plan.batch_size, len(y)), bench.plan.steps(len(y), 1)
    for first in range(done - done % per_epoch, steps, per_epoch):
        order = bench.plan.order(round, client, len(y), first // per_epoch)[: (steps - first) * size]
        yield put(order, x.device)
