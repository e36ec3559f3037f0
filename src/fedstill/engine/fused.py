"""A multi-layer perceptron's training loop: forward, backward and update written out, the update fused into one product.

    aᵢ₊₁ = max(0, Wᵢ·[aᵢ, 1]),   δ = ∂loss/∂z,   W ← (1 − η·wd)·W − η/b·δᵀ·[a, 1]

with δ = softmax(z) − onehot(y) for cross-entropy, and (weight/τ)·(softmax(z/τ) − q_τ(teacher)) for each KL term. A bias is one
more column of its weight, and every activation has a column of ones: so a layer is one product forward, one for the slope of what
is below, and one that already is its update. Buffers are made once a phase. Autograd's graph, its temporaries and a loop over
parameters are most of the cost of such small steps. Here and in `nested` a step is written once more, besides `step` and `SGD`:
the product that computes a gradient already applies it.

Which models and methods are trained so is found out by `recognise`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import terms, tree
from ..core.closed import CROSS_ENTROPY, ClosedForm
from ..core.method import Method, Phase
from ..core.optim import SGD
from ..core.task import Task
from ..core.tree import Params, Tree
from ..data.samples import CACHED, Rows, at_once, gather
from .hooks import calls
from .progress import Course

MANY, TAUGHT = (
    50,
    20,
)  # clients at once from which stacking a small model is faster: by default, and with more terms than CE
ALIGN = 16  # rows of a weight start at multiples of so many entries: products are a tenth faster
_backward_of_relu = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class Layer:
    """One linear layer: the names of its entries in the state, and whether a ReLU follows."""

    weight: str
    bias: str | None
    relu: bool


class Perceptron:
    """Trains a chain of layers. Buffers are reused for all phases and clients, so they stay in the cache."""

    def __init__(
        self,
        layers: tuple[Layer, ...],
        constants: Params | None = None,
        nested: Mapping[type, type[Loop]] | None = None,
        many: int = MANY,
    ) -> None:
        """`constants` are entries of the state that no client trains (see `Net.constants`).

        `nested` are the loops for steps that are more than one step of SGD, by the class that describes them; `many` is how many
        clients at once are faster as a stack, if the model is small.
        """
        self.layers, self.constants, self.nested, self.many = layers, constants or {}, nested or {}, many
        self._loops: dict[object, Loop] = {}

    def form(
        self, method: Method, task: Task, local: Tree, phase: Phase, names: Sequence[str], size: int
    ) -> ClosedForm | None:
        """Return the objective by which a phase that moves these names, in batches of `size`, can be trained here; else None."""
        moving = set(names)
        split = any(layer.bias and (layer.weight in moving) != (layer.bias in moving) for layer in self.layers)
        own = phase.loss is not None or phase.after_epoch is not None or phase.optimizer not in (None, "sgd")
        if not moving or split or own:
            return None
        form = _closed_form(method, task, local)
        if form is None or form.nested is None:
            return form
        loop, whole = self.nested.get(type(form.nested)), sum(1 + bool(layer.bias) for layer in self.layers)
        inputs = {**self.constants, **local[phase.model]}[self.layers[0].weight].shape[1]
        return form if loop is not None and len(moving) == whole and size <= loop.widest * inputs else None

    def train(
        self,
        start: Params,
        names: Iterable[str],
        sgd: SGD,
        x: Rows,
        y: Tensor,
        orders: Iterable[Tensor],
        size: int,
        kept: tuple[Course, Tree] | None = None,
        form: ClosedForm = CROSS_ENTROPY,
        keys: Tensor | None = None,
    ) -> tuple[Params, Tensor, Params]:
        """Train in batches of `size`, an epoch for each of the `orders` of the samples.

        Return the state, Σ of the losses, and the model that an envelope leaves. An order may name fewer samples than there
        are: an incomplete epoch. `kept` is where the phase goes on and is kept, after whole epochs alone, and what is kept
        besides this loop's state. `keys` are those of the phase's steps.
        """
        moving = frozenset(names)
        kind = Loop if form.nested is None else self.nested[type(form.nested)]
        key = moving, dataclasses.replace(sgd, lr=0.0), x.dtype, kind  # a schedule changes lr from round to round
        whole = {**self.constants, **start}
        with torch.no_grad():
            if key not in self._loops:
                self._loops[key] = kind(self.layers, whole, moving, sgd)
            loop = self._loops[key]
            loop.sgd = sgd
            loop.load(whole, form)
            total, size = loop.like.new_zeros(()), min(size, len(y))
            course, besides = kept if kept is not None else (None, {})
            count, flat = 0, x.flatten(1) if isinstance(x, Tensor) else x
            if course is not None and course.halfway is not None:
                past, count = course.halfway.state, course.done
                loop.load({**whole, **past["params"]}, form)
                tree.map(lambda own, value: own.copy_(value), loop.past, past["optimizer"])
                total += past["summed"]
            for order in orders:
                steps = -(-len(order) // size)
                total += loop.epoch(flat, y, order, size, None if keys is None else keys[count : count + steps])
                count += steps
                if course is not None and course.due(count):
                    state = {"params": loop.state(), "optimizer": loop.past, "summed": total}
                    course.save(count, {**besides, **state})
            return {**start, **loop.state()}, total, loop.inner_state()


@calls("closed_form")
def _closed_form(method: Method, task: Task, local: Tree) -> ClosedForm | None:
    with torch.no_grad():
        return method.closed_form(task, local)


class Weights:
    """The weights of all layers, each with its bias as last column, and the views of them that steps use."""

    def __init__(self, layers: tuple[Layer, ...], like: Params) -> None:
        self.layers, shapes = layers, [like[layer.weight].shape for layer in layers]
        self.like, self.inputs = like[layers[0].weight], [inputs for _, inputs in shapes]
        self.all = [
            aligned(self.like, out, into + (layer.bias is not None))
            for layer, (out, into) in zip(layers, shapes, strict=True)
        ]
        self.transposed = [weight.t() for weight in self.all]
        self.kernels = [weight[:, :inputs] for weight, inputs in zip(self.all, self.inputs, strict=True)]

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Take over a state's weights and biases."""
        for layer, weight, inputs in zip(self.layers, self.all, self.inputs, strict=True):
            weight[:, :inputs] = params[layer.weight]
            if layer.bias is not None:
                weight[:, inputs] = params[layer.bias]

    def state(self, moves: Sequence[bool]) -> Params:
        """Return copies of the weights and biases of the layers that move, by name."""
        state: Params = {}
        for layer, weight, inputs, moving in zip(self.layers, self.all, self.inputs, moves, strict=True):
            if moving:
                state[layer.weight] = weight[:, :inputs].clone(memory_format=torch.contiguous_format)
            if moving and layer.bias is not None:
                state[layer.bias] = weight[:, inputs].clone(memory_format=torch.contiguous_format)
        return state


class Objective:
    """A closed form's terms of the logits, for a client's samples in some order."""

    def __init__(self, form: ClosedForm, y: Tensor, order: Tensor, classes: int, dtype: torch.dtype) -> None:
        self.form, self.y = form, y[order]
        self.teachers = [t.teacher[order] for t in form.taught]
        self.targets = F.one_hot(self.y, classes).to(dtype)
        if form.labels != 1:
            self.targets.mul_(form.labels)
        for term, teacher in zip(form.taught, self.teachers, strict=True):
            self.targets.add_(torch.softmax(teacher / term.tau, 1), alpha=term.weight / term.tau)
        self.plain = form.labels + sum(term.weight for term in form.taught if term.tau == 1)
        self.softened = [(term.tau, term.weight / term.tau) for term in form.taught if term.tau != 1]

    def slope(self, z: Tensor, targets: Tensor, out: Tensor) -> None:
        """Write ∂(the sum of a batch's losses)/∂z, given the batch's rows of `targets`."""
        torch.softmax(z, 1, out=out)
        if self.plain != 1:
            out.mul_(self.plain)
        for tau, weight in self.softened:
            out.add_(torch.softmax(z / tau, 1), alpha=weight)
        out.sub_(targets)

    def losses(self, z: Tensor) -> Tensor:
        """Return each sample's loss, from all logits."""
        losses = F.cross_entropy(z, self.y, reduction="none")
        if self.form.labels != 1:
            losses.mul_(self.form.labels)
        for term, teacher in zip(self.form.taught, self.teachers, strict=True):
            losses.add_(terms.kl_each(teacher, z, term.tau), alpha=term.weight)
        return losses


class Loop:
    """Weights, optimiser state, and the buffers that every step uses again."""

    widest = float("inf")  # samples of a batch for each input, up to which the loop pays

    def __init__(self, layers: tuple[Layer, ...], like: Params, moving: frozenset[str], sgd: SGD) -> None:
        self.layers, self.sgd, self.form = layers, sgd, CROSS_ENTROPY
        self.own, self.anchor = Weights(layers, like), list[Tensor]()
        self.like, self.inputs, self.outputs = self.own.like, self.own.inputs, len(self.own.all[-1])
        self.weights = self.own.all
        self.moves = [layer.weight in moving for layer in layers]
        self.lowest = self.moves.index(True)
        self.past = sgd.init({str(i): weight for i, weight in enumerate(self.weights)})
        self.velocity = list(self.past.get("momentum", {}).values())
        self.data = aligned(self.like, 0, self.inputs[0] + 1)
        self.rooms: dict[int, Room] = {}
        self.pulled = self.like.new_zeros(())

    def load(self, start: Params, form: ClosedForm) -> None:
        """Begin from these weights, without momentum."""
        self.form = form
        self.own.load(start)
        for velocity in self.velocity:
            velocity.zero_()
        if form.pull:
            anchor = Weights(self.layers, start)
            anchor.load({**start, **form.anchor})
            self.anchor = anchor.all

    def state(self) -> Params:
        """Return copies of the weights and biases that move, by name."""
        return self.own.state(self.moves)

    def inner_state(self) -> Params:
        """Return the model that an envelope leaves."""
        return {}

    def epoch(self, x: Rows, y: Tensor, order: Tensor, size: int, keys: Tensor | None) -> Tensor:
        """Pass once over the samples in batches of `size`; return the sum of the losses, computed from all outputs at the end."""
        samples = len(order)
        objective, logits = (
            Objective(self.form, y, order, self.outputs, x.dtype),
            self.like.new_empty(samples, self.outputs),
        )
        count, rest = divmod(samples, size)
        rooms = [self.room(size)] * count + ([self.room(rest)] if rest else [])
        self.pulled.zero_()
        rows = (torch.split(rows, size) for rows in (logits, objective.targets))
        batches = zip(rooms, self.batches(x, order, size), *rows, strict=True)
        for number, (room, a, z, targets) in enumerate(batches):
            self.step(objective, room, a, z, targets, number, number + 1 == len(rooms))
        losses, full = objective.losses(logits), count * size
        total = losses[:full].sum() / size
        return (total + losses[full:].mean() if rest else total) + self.pulled

    def batches(self, x: Rows, order: Tensor, size: int) -> Iterator[Tensor]:
        """Yield the samples in an order, by batches: one gather of all, or of a few batches where they lie in a file."""
        for rows in torch.split(order, size * -(-at_once(x, CACHED) // size)):
            yield from torch.split(self.gather(x, rows), size)

    def gather(self, x: Rows, order: Tensor) -> Tensor:
        """Return the samples in an order, with a column of ones where the first layer has a bias."""
        if len(self.data) < len(order):
            self.data = aligned(self.like, len(order), self.inputs[0] + 1)
            self.data[:, -1] = 1
        gather(x, order, self.data[: len(order), :-1])
        return self.data[: len(order), : self.weights[0].shape[1]]

    def room(self, rows: int) -> Room:
        """Return the buffers for batches of so many samples."""
        if rows not in self.rooms:
            self.rooms[rows] = Room(self.own, rows)
        return self.rooms[rows]

    def step(
        self, objective: Objective, room: Room, a: Tensor, z: Tensor, targets: Tensor, number: int, last: bool
    ) -> None:
        """Make a step by a batch `a`, the `number`-th of an epoch; write its logits to `z`."""
        torch.mm(a, self.own.transposed[0], out=room.units[0] if room.units else z)
        self.forward(room, self.own, z)
        objective.slope(z, targets, room.slopes[-1])
        self.backward(room, self.own, self.lowest)
        for i in range(len(self.layers) - 1, self.lowest - 1, -1):
            if self.moves[i]:
                self.update(i, room.risen[i], room.before[i - 1] if i else a, room.rows)

    def forward(self, room: Room, weights: Weights, z: Tensor) -> None:
        """Compute all layers' outputs from the first one's products, which lie in their place."""
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            into = room.units[i] if i < last else z
            if i:
                torch.mm(room.before[i - 1], weights.transposed[i], out=into)
            if layer.relu:
                into.relu_()

    def backward(self, room: Room, weights: Weights, lowest: int) -> None:
        """Compute the slopes of the layers below the last one, whose own is there, down to `lowest`."""
        for i in range(len(self.layers) - 1, lowest, -1):
            torch.mm(room.slopes[i], weights.kernels[i], out=room.slopes[i - 1])
            if self.layers[i - 1].relu:
                _backward_of_relu(room.slopes[i - 1], room.units[i - 1], 0, grad_input=room.slopes[i - 1])

    def update(self, i: int, slope: Tensor, a: Tensor, rows: int) -> None:
        """Take `SGD.update`'s step by the gradient slope·a / rows, fused with the product that computes it."""
        sgd, weight, pull = self.sgd, self.weights[i], self.form.pull
        away = weight - self.anchor[i] if pull else weight
        if pull:
            self.pulled.add_(away.square().sum(), alpha=pull / 2)
        if not sgd.momentum:
            weight.addmm_(slope, a, beta=1 - sgd.lr * sgd.weight_decay, alpha=-sgd.lr / rows)
            if pull:
                weight.add_(away, alpha=-sgd.lr * pull)
        elif sgd.nesterov:
            gradient = torch.mm(slope, a).div_(rows)
            gradient = gradient.add_(away, alpha=pull) if pull else gradient
            sgd.update({"": weight}, {"": gradient}, {"momentum": {"": self.velocity[i]}})
        else:
            velocity = self.velocity[i].addmm_(slope, a, beta=sgd.momentum, alpha=1 / rows)
            if sgd.weight_decay:
                velocity.add_(weight, alpha=sgd.weight_decay)
            if pull:
                velocity.add_(away, alpha=pull)
            weight.add_(velocity, alpha=-sgd.lr)


class Room:
    """Buffers for batches of one size."""

    def __init__(self, weights: Weights, rows: int) -> None:
        widths, like = [len(w) for w in weights.all], weights.like
        wide = [aligned(like, rows, width + 1) for width in widths[:-1]]
        for a in wide:
            a[:, -1] = 1
        self.rows, self.units = rows, [a[:, :-1] for a in wide]
        self.before = [a[:, : w.shape[1]] for a, w in zip(wide, weights.all[1:], strict=True)]
        self.slopes = [like.new_empty(rows, width) for width in widths]
        self.risen = [slope.t() for slope in self.slopes]


def aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix of zeros whose rows start at aligned places."""
    return like.new_zeros(rows, -(-columns // ALIGN) * ALIGN)[:, :columns]
