"""What a method may know: the model as functions, the settings of local work, the client's own data; and a phase of that work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from . import objective as objectives
from . import plan, tree
from .augment import Augment
from .batch import Batch
from .errors import InputError, NoSamples, Shown
from .optim import PLAIN, SGD, Adam, Optimizer, OptimizerName, Recipe, clipped
from .plan import Length
from .secret import Secret
from .tree import Params, Tree


class Average(Protocol):
    """A mean of the clients' trees, or a robust rule or a private mean in its place."""

    def __call__(self, trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
        """Return one tree for all.

        `around` is what the clients started from, so that a rule can look at their changes; it may have more entries than the
        trees. None: the trees are changes themselves, or gradients.
        """


SAMPLES = 16  # per pass where each sample has a gradient of its own
CHUNK = 512  # samples per forward pass where no gradient is needed; the result does not depend on it


class Channels(Protocol):
    """A model divided by channels (see `nn.channels`)."""

    def both(self, p: float) -> bool:
        """Return whether every layer has private and shared channels."""

    def shared(self, name: str, value: Tensor, p: float) -> Tensor:
        """Return the shared part of an entry of the state, as a view."""

    def is_private(self, name: str, value: Tensor, p: Tensor) -> Tensor:
        """Return where an entry is private."""

    def gates(self, p: Tensor, private: bool, like: Tensor) -> dict[str, Tensor]:
        """Return for every layer's input 1 where its channels are private (or shared), 0 elsewhere."""


class Model(Protocol):
    """A model as a pure function of its parameters (see `nn.net.Net`)."""

    module: nn.Module
    parameters: tuple[str, ...]  # names that training may change
    buffers: tuple[str, ...]  # the other names of the state that training changes
    names: tuple[str, ...]  # both, in the order of the state
    outputs: int  # numbers in the output for a sample
    example: Tensor  # one or two samples
    device: torch.device
    dtype: torch.dtype

    def __call__(
        self,
        params: Params,
        x: Tensor,
        *,
        train: bool,
        key: Tensor | None = None,
        mask: Tensor | None = None,
        taps: dict[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the output."""

    def head(
        self,
        modules: tuple[str, ...],
        params: Params,
        features: Tensor,
        *,
        train: bool,
        key: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the head's output for given features."""

    @property
    def constants(self) -> Params:
        """The entries of the state that training never changes; they are in no tree."""

    def initial(self) -> Params:
        """Return a copy of the initial state, without the constants."""

    def export(self, params: Params) -> Params:
        """Return a full state dict on the CPU."""

    def fast_layout(self, value: Tensor) -> Tensor:
        """Return an entry of the state in the memory layout that is fastest; its values do not change."""

    def channels(self) -> Channels:
        """Return the model's layers by channel."""


@dataclass(frozen=True)
class Split:
    """The names (parameters and buffers) of a model's head and of its body."""

    modules: tuple[str, ...]  # the head's modules
    head: frozenset[str]
    body: frozenset[str]


def pick(params: Params, names: frozenset[str]) -> Params:
    """Return the entries with these names, in the model's order."""
    return {name: value for name, value in params.items() if name in names}


Objective: TypeAlias = Callable[[Params, Params], tuple[Tensor, Params]]  # (weights, buffers) → loss, new buffers
Differentiate: TypeAlias = Callable[[Objective, Params, Params], tuple[Params, tuple[Tensor, Params]]]


def by_func(objective: Objective, weights: Params, buffers: Params) -> tuple[Params, tuple[Tensor, Params]]:
    """Differentiate by `torch.func`, so that it can run inside `vmap`."""
    grads, result = grad_and_value(objective, has_aux=True)(weights, buffers)
    return grads, result


def by_autograd(objective: Objective, weights: Params, buffers: Params) -> tuple[Params, tuple[Tensor, Params]]:
    """Differentiate by autograd, which is faster for a client by itself: kernels of our own take no wrapped tensors."""
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    with torch.enable_grad():
        loss, buffers = objective(leaves, buffers)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    else:  # it depends on no weight
        grads = tuple(torch.zeros_like(weight) for weight in weights.values())
    return dict(zip(leaves, grads, strict=True)), (loss.detach(), tree.map(torch.detach, buffers))


@dataclass(frozen=True)
class Site:
    """One client's own training data, and how much work it does this round. Under `vmap` these are that client's slices."""

    x: Any  # all training samples of the client, or of the stack's clients one after another; x[rows] gives a tensor
    y: Tensor
    index: Tensor  # which rows of x are this client's (padded at the end)
    samples: Tensor  # how many there are
    steps: Tensor  # how many SGD steps the method's phases take this round
    last: Tensor  # the round in which the client last trained (float64); 0: it has not taken part yet
    trained: bool | None = None  # whether it has taken part, where the host knows that
    balance: Tensor | None = None  # the weights of the classes, where they have any


class Absent:
    """Stands for a client's samples where they are not in this process: whatever asks for them raises `NoSamples`."""

    def __init__(self, client: int) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        raise NoSamples(self._client)

    def __getitem__(self, rows: Any) -> Any:
        raise NoSamples(self._client)

    def __len__(self) -> int:
        raise NoSamples(self._client)


@dataclass(frozen=True)
class SampleNoise:
    """DP-SGD at clients: gradients of single samples are clipped to `clip`, their sum gets noise of deviation noise·clip."""

    clip: float
    noise: float
    batch_size: int  # samples of a step on average
    secret: Secret | None = None  # what batches and noise are drawn from, of one client's work; None: from the plan

    def normals(self, key: Tensor, count: int) -> Tensor:
        """Return a step's noise, in units of its deviation."""
        if self.secret is None:
            return plan.normals(key, count)
        return self.secret.normals(count, "noise", int(key)).to(key.device)


@dataclass(frozen=True)
class Task:
    """The setting of local work, handed to every hook of a method. `round` counts from 1; `site` is set at a client.

    `average(trees, weights, around)` is the server's mean; every method whose `merge` averages calls it, so that a robust rule
    can take its place.
    """

    net: Model
    split: Split | None
    clients: int
    rounds: int
    epochs: int
    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    local_steps: int = 0  # SGD steps of a phase without a length of its own, in place of `epochs`; 0: by epochs
    round: int = 0
    site: Site | None = None
    seed: int = 0
    average: Average = tree.mean
    private: SampleNoise | None = None  # how phases of "params" protect single samples; None: not
    recipe: Recipe = PLAIN  # the optimiser of local work and what goes with it
    augment: Augment | None = None  # what a step's batch passes through; None: nothing
    now: Any = None  # the learning rate of this step, in a method's own step where a schedule changes it; else None
    objective: objectives.Objective = objectives.CLASSES  # what is learned: the loss, and what distillation means
    differentiate: Differentiate = by_func  # how hooks that ask for a gradient get it

    def at_site(self, site: Site) -> Task:
        """Return the task as a client with this data sees it."""
        return dataclasses.replace(self, site=site)

    @property
    def length(self) -> Length:
        """How long the experiment has clients train, where a phase has no length of its own."""
        return Length(steps=self.local_steps) if self.local_steps else Length(self.epochs)

    @property
    def rate(self) -> Any:
        """The learning rate now: `lr` times the schedule's factor of this round or, in a method's own step, of this step."""
        return self.lr * self.factor if self.now is None else self.now

    @property
    def factor(self) -> float:
        """The factor of this round by which the schedule multiplies learning rates; 1 where it changes none by round."""
        schedule = self.recipe.schedule
        return 1.0 if schedule is None or schedule.over == "steps" else schedule.factor(self.round - 1, self.rounds)

    def optimizer(
        self,
        rate: Any,
        momentum: float | None = None,
        kind: OptimizerName | None = None,
        weight_decay: float | None = None,
    ) -> Optimizer:
        """Return an optimiser with this learning rate; what is None is as the experiment says."""
        recipe, momentum = self.recipe, self.momentum if momentum is None else momentum
        decay, kind = self.weight_decay if weight_decay is None else weight_decay, kind or recipe.optimizer
        if kind == "sgd":
            return SGD(rate, momentum, self.nesterov and momentum > 0, decay)
        return Adam(rate, recipe.beta1, recipe.beta2, recipe.eps, decay, kind == "adamw")

    def optimizer_of(self, phase: Phase) -> Optimizer:
        """Return the optimiser of a phase, with the learning rate of this round."""
        lr = self.lr if phase.lr is None else phase.lr
        return self.optimizer(lr * self.factor, phase.momentum, phase.optimizer)

    @property
    def seen(self) -> Tensor:
        """Whether the client has taken part: in `begin` and `finish` before this round, in `personal` so far."""
        site = self.here()
        seen = site.last > 0
        if site.trained is not None:
            seen.known = site.trained  # type: ignore[attr-defined]
        return seen

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """Return the model's output in training: dropout on, BatchNorm over the batch, which updates its running statistics."""
        return self.net(params, batch.x, train=True, key=batch.key, mask=batch.mask)

    # ---- the objective -----------------------------------------------------------------------------------------------
    def fit(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the data loss of a batch: cross-entropy, squared error, …, by the objective."""
        return self.objective.loss(outputs, batch, self._balance)

    def each(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the data loss, one number a sample."""
        return self.objective.each(outputs, batch.y, self._balance)

    def distill(self, teacher: Tensor, student: Tensor, tau: float, batch: Batch) -> Tensor:
        """Return what holds a student to a teacher, averaged over a batch: KL(q_τ(teacher) ‖ q_τ(student)), by the objective."""
        return self.objective.distill(teacher, student, tau, batch)

    def distill_each(self, teacher: Tensor, student: Tensor, tau: float, batch: Batch) -> Tensor:
        """Return the same, one number a sample."""
        return self.objective.distill_each(teacher, student, tau, batch.y)

    @property
    def _balance(self) -> Tensor | None:
        return None if self.site is None else self.site.balance

    # ---- the model ---------------------------------------------------------------------------------------------------
    def gated_logits(self, params: Params, batch: Batch, gates: Mapping[str, Tensor]) -> Tensor:
        """Return training output with modules' inputs multiplied by gates; BatchNorm's running statistics stay unchanged."""
        copies = {name: params[name].clone() for name in self.net.buffers}
        return self.net({**params, **copies}, batch.x, train=True, key=batch.key, mask=batch.mask, gates=gates)

    @property
    def channels(self) -> Channels:
        """The model's layers by channel, followed once; a model that cannot be followed is refused by name."""
        return self.net.channels()

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the model's output in evaluation, without gradient, computed in chunks; x[rows] gives a tensor."""
        with torch.no_grad():
            params = {name: self.net.fast_layout(value) for name, value in params.items()}
            chunks = (slice(first, first + CHUNK) for first in range(0, max(1, len(x)), CHUNK))
            return torch.cat([self.net(params, x[rows], train=False) for rows in chunks])

    def local_logits(self, params: Params) -> Tensor:
        """Return the evaluation output for all of the client's training samples, as they are: not augmented.

        A teacher of batches is `teach` and `taught`, which look entries up only where batches are not augmented.
        """
        site = self.here()
        with torch.no_grad():
            params = {name: self.net.fast_layout(value) for name, value in params.items()}
            return torch.cat([self.net(params, site.x[rows], train=False) for rows in torch.split(site.index, CHUNK)])

    def teach(self, params: Params, features: bool = False) -> Tree:
        """Return a teacher for `taught`: its evaluation output for all local data or, where batches are augmented, itself.

        With `features` it is the head's input that teaches.
        """
        if self.augment is not None:
            return {"model": params}
        return {"rows": self.local_features(params) if features else self.local_logits(params)}

    def taught(self, teacher: Tree, batch: Batch, features: bool = False) -> Tensor:
        """Return a teacher's evaluation output for the batch, without gradient: looked up, or of the augmented samples."""
        if "rows" in teacher:
            return teacher["rows"][batch.index]  # type: ignore[no-any-return]
        params = {name: value.detach() for name, value in teacher["model"].items()}
        with torch.no_grad():
            if not features:
                return self.net(params, batch.x, train=False).detach()
            first = self.need_split().modules[0]
            taps = {first: batch.y}
            self.net(params, batch.x, train=False, taps=taps)
            return taps[first].flatten(1).detach()

    def augmented(self, batch: Batch) -> Batch:
        """Return a batch as training sees it."""
        return batch if self.augment is None else self.augment(batch)

    def features(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the training output and the head's input, flattened: (logits, features)."""
        taps = {name: batch.x for name in self.need_split().modules}
        logits = self.net(params, batch.x, train=True, key=batch.key, mask=batch.mask, taps=taps)
        return logits, taps[self.need_split().modules[0]].flatten(1)

    def head_logits(self, params: Params, features: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the head's output for flattened features; `params` needs the head's entries.

        In training mode with a batch's key and mask; without a batch in evaluation mode.
        """
        modules, train = self.need_split().modules, batch is not None
        key = torch.zeros((), dtype=torch.int64, device=features.device) if batch is None else batch.key
        mask = None if batch is None else batch.mask
        return self.net.head(modules, params, features, train=train, key=key, mask=mask)

    def feature_size(self) -> int:
        """Return the size of the head's flattened input for one sample."""
        first = self.need_split().modules[0]
        taps = {first: self.net.example}
        with torch.no_grad():
            self.net(self.net.initial(), self.net.example, train=False, taps=taps)
        return taps[first].flatten(1).shape[1]

    def local_features(self, params: Params) -> Tensor:
        """Return the head's input in evaluation for all of the client's training samples."""
        site, first = self.here(), self.need_split().modules[0]
        parts = []
        with torch.no_grad():
            params = {name: self.net.fast_layout(value) for name, value in params.items()}
            for rows in torch.split(site.index, CHUNK):
                taps = {first: site.index}
                self.net(params, site.x[rows], train=False, taps=taps)
                parts.append(taps[first].flatten(1))
        return torch.cat(parts)

    def local_gradient(self, value: Callable[[Params, Batch], Tensor], params: Params, squared: bool = False) -> Params:
        """Return the mean of ∇value, or of its square (a Fisher diagonal), over the client's training samples.

        `value(params, batch)` returns one number for each sample; the gradient is by the trainable parameters.
        """
        site = self.here()
        rest = {name: params[name] for name in params if name not in self.net.parameters}
        device = site.y.device
        real = (torch.arange(len(site.index), device=device) < site.samples).to(self.net.dtype)
        zero = torch.zeros((), dtype=torch.int64, device=device)

        def at(weights: Params, x: Tensor, y: Tensor, index: Tensor, keep: Tensor) -> Tensor:
            batch = Batch(x, y, index, zero, keep)
            return (value({**rest, **weights}, batch) * keep).sum()

        moving = self.trainable(params)
        total = {name: torch.zeros_like(weight) for name, weight in moving.items()}
        positions = torch.arange(len(site.index), device=device)
        for where in torch.split(positions, SAMPLES if squared else CHUNK):
            rows = site.index[where]
            inputs = {"x": site.x[rows], "y": site.y[rows], "index": where, "keep": real[where]}
            if squared:
                each = vmap(grad(at), in_dims=(None, 0, 0, 0, 0))
                grads = each(moving, *(tensor.unsqueeze(1) for tensor in inputs.values()))
                grads = {name: g.square().sum(0) for name, g in grads.items()}
            else:
                grads, _ = self.differentiate(lambda weights, x: (at(weights, *x.values()), {}), moving, inputs)
            total = {name: total[name] + grads[name] for name in total}
        return {name: value / site.samples for name, value in total.items()}

    def membership(self) -> Tensor:
        """Return one-hot labels of the client's training samples, one row each; padding rows are zero."""
        site = self.here()
        real = torch.arange(len(site.index), device=site.y.device) < site.samples
        classes = torch.arange(self.net.outputs, device=site.y.device)
        return ((site.y[site.index].unsqueeze(1) == classes) & real.unsqueeze(1)).to(self.net.dtype)

    # ---- for steps that need more than one gradient ------------------------------------------------------------------
    def gradient(
        self, loss: Callable[[Params, Batch], Tensor], params: Params, batch: Batch
    ) -> tuple[Params, Tensor, Params]:
        """Return (∇loss by the trainable parameters, the loss, the buffers after the pass); `params` is not changed."""
        rest = {name: params[name].detach() for name in self.net.buffers}

        def at(weights: Params, rest: Params) -> tuple[Tensor, Params]:
            state = {**{name: value.clone() for name, value in rest.items()}, **weights}
            return loss(state, batch), {name: state[name] for name in rest}

        weights = {name: value.detach() for name, value in self.trainable(params).items()}
        grads, (value, buffers) = self.differentiate(at, weights, rest)
        return grads, value, buffers

    def at_rest(self, weights: Params, momentum: float | None = None) -> Tree:
        """Return the state of the experiment's optimiser before its first step, for `descend`."""
        return self.optimizer(self.lr, momentum).at_rest(weights)

    def descend(
        self,
        weights: Params,
        grads: Params,
        state: Tree,
        momentum: float | None = None,
        weight_decay: float | None = None,
    ) -> tuple[Params, Tree]:
        """Make one step of the experiment's optimiser, with its clipping: return the new weights and the optimiser's state.

        `momentum` and `weight_decay` stand for the experiment's where they are not None.
        """
        optimizer = self.optimizer(self.rate, momentum, weight_decay=weight_decay)
        return optimizer.stepped(weights, clipped(grads, self.recipe.clip), state)

    # ---- randomness --------------------------------------------------------------------------------------------------
    def uniform(self, *words: int) -> float:
        """Draw a number in [0, 1) from the seed, the round and these words; equal at the server and at every client."""
        return (plan.key(self.seed, plan.METHOD, self.round, *words) >> 11) / 2**53

    def key(self, *words: int) -> Tensor:
        """Return a key for `uniforms` from the seed, the round and these words."""
        number = plan.key(self.seed, plan.METHOD, self.round, *words) >> 33
        return torch.tensor(number, dtype=torch.int64, device=self.net.device)

    def permutation(self, n: int, *words: int) -> list[int]:
        """Return a random order of 0 … n−1 from the seed, the round and these words."""
        return [int(i) for i in plan.permutation(plan.key(self.seed, plan.METHOD, self.round, *words), n)]

    def beside(self, params: Params, batch: Batch, stream: int) -> Tensor:
        """Return the training output of another model than the one that trains, for the same batch, without gradient.

        Its dropout is its own, by `stream`; BatchNorm takes the batch's statistics, and its running ones stay as they are.
        """
        state = {name: value.detach() for name, value in params.items()}
        state |= {name: state[name].clone() for name in self.net.buffers}
        key = plan.uniform_bits(batch.key, 2 * plan.DRAWS + stream, ()) >> 1
        return self.net(state, batch.x, train=True, key=key, mask=batch.mask).detach()

    def uniforms(self, key: Tensor, stream: int, shape: Sequence[int]) -> Tensor:
        """Draw numbers in (0, 1) from a key, such as a batch's; different `stream`s give independent draws.

        Rows do not depend on how many there are, so padding a batch changes none of them.
        """
        bits = plan.uniform_bits(key, plan.DRAWS + stream, shape)
        return ((bits.double() + 0.5) / 2**32).to(self.net.dtype)

    def redraw(self, batch: Batch, stream: int) -> Batch:
        """Draw another batch of the same size from the client's samples, without replacement, by the batch's key."""
        site = self.here()
        index = drawn(batch.key, stream, len(site.index), site.samples)[: len(batch.y)]
        rows, key = site.index[index], plan.uniform_bits(batch.key, 2 * plan.DRAWS + stream, ()) >> 1
        return self.augmented(Batch(site.x[rows], site.y[rows], index, key, batch.mask))

    def trainable(self, params: Params) -> Params:
        """Return the trainable parameters, without buffers."""
        return {name: params[name] for name in self.net.parameters}

    def head(self, params: Params) -> Params:
        """Return the entries of a state that belong to the head."""
        return pick(params, self.need_split().head)

    def body(self, params: Params) -> Params:
        """Return the entries of a state that belong to the body."""
        return pick(params, self.need_split().body)

    def head_modules(self) -> tuple[str, ...]:
        """Return the names of the head's modules; empty if the model has no head."""
        return () if self.split is None else self.split.modules

    def need_split(self) -> Split:
        """Return the split into head and body; refuse a model without a known head."""
        if self.split is None:
            modules = [name for name, _ in self.net.module.named_modules() if name]
            raise InputError(
                "head",
                Shown("(none)"),
                f"named, since the model does not name its head: one or more of {', '.join(modules)}",
            )
        return self.split

    def here(self) -> Site:
        """Return the client's own data; only for hooks that run at a client."""
        if self.site is None:
            raise RuntimeError("this hook runs at the server, which has no client data")
        return self.site


def drawn(key: Tensor, stream: int, rows: int, samples: Tensor | None = None) -> Tensor:
    """Return a random order of a client's rows, by a step's key or by several (rows beyond its `samples` last)."""
    ranks = plan.uniform_bits(key, plan.DRAWS + stream, (rows,))
    if samples is not None:
        ranks = torch.where(torch.arange(rows, device=key.device) < samples, ranks, 1 << 32)
    return ranks.argsort(dim=-1, stable=True)


@dataclass(frozen=True)
class Upload:
    """A client's upload as `merge` sees it. It may answer an earlier round's download: use `down`, not the present state."""

    tree: Tree  # all that the client sent, as it was sent
    weight: float  # the client's number of samples
    client: int
    down: Tree = field(default_factory=dict)  # what the client had been sent when it began
    rebased: Params | None = None  # asynchronous training: `tree["params"]` as they stand for the current model

    @property
    def params(self) -> Params:
        """What a mean of models takes: the uploaded parameters, rebased onto the current model where they are stale."""
        return self.tree["params"] if self.rebased is None else self.rebased


Loss: TypeAlias = Callable[[Task, Params, Tree, Batch], Tensor]


@dataclass(frozen=True)
class Phase:
    """A phase of local work: what is trained, by which loss, for how long. Each phase starts with fresh optimiser state, or with
    the client's own of the same phase in its last round where the experiment keeps it. A schedule also scales a phase's own `lr`.

    `model` names the entry of `local` that is trained; `moves` the names in it that may change (None: all). Names that do
    not move keep their exact values, buffers included. None elsewhere means: as the experiment says. A phase lasts `epochs`
    or `steps` SGD steps, which are the same number for every client; with neither, the experiment's.
    """

    epochs: int | None = None
    steps: int | None = None
    moves: frozenset[str] | None = None
    model: str = "params"
    loss: Loss | None = None
    lr: float | None = None
    momentum: float | None = None
    optimizer: OptimizerName | None = None
    enter: Callable[[Task, Tree], Tree] | None = None
    """*Client.* `enter(task, local) -> local`: called before the phase with what the phase before left."""
    after_epoch: Callable[[Task, Params, Params], Params] | None = None
    """*Client.* `after_epoch(task, before, after) -> values`: new values from the weights before and after a whole epoch."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"a phase of {self.epochs} epochs and {self.steps} steps: should have one of the two")

    @property
    def own_length(self) -> bool:
        """Whether the phase says itself how long it lasts."""
        return self.epochs is not None or self.steps is not None

    def length(self, task: Task) -> Length:
        """Return how long the phase lasts."""
        if self.own_length:
            return Length(self.epochs or 0, self.steps or 0)
        return task.length
