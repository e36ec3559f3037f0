"""Look at a model before any work: what it draws, what it returns, and whether a run with it could be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.errors import InputError, Shown, first_line
from ..core.tree import Params
from .watch import Watch


class Model(Protocol):
    """What is looked at (see `net.Net`)."""

    module: nn.Module

    def watched(self, x: Tensor, train: bool) -> tuple[Any, Watch]:
        """Run a pass under a watch."""

    def hidden(self) -> Params:
        """Return copies of the buffers that a state dict leaves out."""


@dataclass(frozen=True)
class Output:
    """The shape that a sample's output should have; unless `exact`, the last number may be larger."""

    shape: tuple[int, ...]
    exact: bool = False

    def fits(self, out: Any, rows: int) -> bool:
        """Return whether this is the output for so many samples."""
        got = tuple(out.shape) if isinstance(out, Tensor) else ()
        if got[:-1] != (rows, *self.shape[:-1]):
            return False
        return got[-1] == self.shape[-1] or (not self.exact and got[-1] > self.shape[-1])


@dataclass(frozen=True)
class Seen:
    """What passes through a model have shown."""

    example: Tensor  # the samples, as the model takes them
    outputs: int  # numbers in the output for a sample
    draws: bool  # whether training is random
    axes: dict[int, int]  # which axis of a draw has the samples, where not the first
    composites: bool  # whether there are attentions or recurrent layers
    norms: bool  # whether there are BatchNorms
    written: set[str]  # the buffers that a pass writes to


def look(model: Model, x: Tensor, output: Output, dtype: torch.dtype) -> Seen:
    """Look at a model with one and two samples; refuse one that cannot be trained reproducibly.

    Whole numbers are given to the model as they are, as ids; to one that does not take them, as numbers.
    """
    pair = torch.cat([x[:1], x[:1]]) if len(x) < 2 else x[:2]
    if pair.is_floating_point():
        return _look(model, pair, output)
    try:
        return _look(model, pair, output)
    except InputError as refusal:
        if not isinstance(refusal.__cause__, RuntimeError):  # which is what layers of floating numbers say of ids
            raise
        try:
            return _look(model, pair.to(dtype), output)
        except InputError:
            raise refusal from None


def _look(model: Model, pair: Tensor, output: Output) -> Seen:
    name, device = Shown(type(model.module).__name__), pair.device
    hidden = model.hidden()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        try:
            (logits, two), (lone, one) = model.watched(pair, True), model.watched(pair[:1], True)
            (scored, evaluated), (alone, last) = model.watched(pair, False), model.watched(pair[:1], False)
        except InputError:
            raise
        except Exception as error:
            shape, kind = "×".join(map(str, pair.shape[1:])), "" if pair.is_floating_point() else " of ids"
            right = f"a model that takes samples{kind} of shape {shape} ({first_line(error)})"
            raise InputError("model", name, right) from error
    for rows, out in ((2, logits), (1, lone), (2, scored), (1, alone)):
        if not output.fits(out, rows):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            right = f"a model with an output of shape [batch, {', '.join(map(str, output.shape))}]"
            raise InputError("model", Shown(f"{name} with output {got} for {rows} samples"), right)
    slack = 1e-9 if scored.dtype == torch.float64 else 1e-3
    if (scored[:1] - alone).abs().max() > slack * (1 + alone.abs().max()):
        right = "one whose evaluation takes each sample by itself (BatchNorm with track_running_stats=True, for one)"
        raise InputError("model", name, right)
    changed = [n for n, v in model.hidden().items() if not torch.equal(v, hidden[n])]
    if changed:
        right = "persistent if training changes it: what a state dict leaves out would be lost"
        raise InputError("model", Shown(f"buffer {changed[0]}"), right)
    return Seen(
        example=pair,
        outputs=int(logits.shape[-1]),
        draws=bool(two.draws.shapes),
        axes=samples_axes(two.draws.shapes, one.draws.shapes),
        composites=two.composites + evaluated.composites > 0,
        norms=two.norms > 0,
        written=two.written | one.written | evaluated.written | last.written,
    )


def samples_axes(pair: Sequence[tuple[int, ...]], alone: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Return which axis of each draw has the samples, by the shapes drawn for two samples and for one; the first is left out.

    >>> samples_axes([(2, 5), (7, 2, 3), (4, 4)], [(1, 5), (7, 1, 3), (4, 4)])
    {2: 1}
    """
    axes: dict[int, int] = {}
    for number, (two, one) in enumerate(zip(pair, alone, strict=False), start=1):
        differing = [axis for axis, (a, b) in enumerate(zip(two, one, strict=False)) if a != b]
        if len(two) == len(one) and len(differing) == 1 and differing[0]:
            axes[number] = differing[0]
    return axes


def logits_of(out: Any) -> Any:
    """Return the scores of the classes in a model's output: `.logits`, the entry "logits", or the first of a tuple.

    >>> logits_of({"loss": None, "logits": 1}), logits_of((2, 3)), logits_of(4)
    (1, 2, 4)
    """
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping):
        return out.get("logits", out)
    found = getattr(out, "logits", None)
    if found is not None:
        return found
    return out[0] if isinstance(out, tuple | list) and out else out
