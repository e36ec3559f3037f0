"""Watch a pass through a model: where it draws random numbers that have no key, and what it is given that it cannot take."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import InputError, Shown
from ..core.tree import Params
from .draws import NoKey
from .mode import AS_WRITTEN, ExecutionMode

RATES = ("drop", "prob", "rate", "noise", "jitter", "p")  # what attributes are called that turn randomness off at 0


class Watch(ExecutionMode):
    """Executes a model as it is written, and refuses what a run could not repeat, by the module that does it."""

    def __init__(self, key: Tensor | None, device: torch.device) -> None:
        super().__init__(key, None, AS_WRITTEN)
        self.device = device
        self.path: list[tuple[str, nn.Module]] = []  # the modules that are being executed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _torch_state(self.device)
        name = getattr(func, "__name__", str(func))
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        except NoKey:
            raise self._refusal(f"torch's {name}", "in evaluation") from None
        if not torch.equal(before, _torch_state(self.device)):
            raise self._refusal(f"torch's {name}", "which has no keyed form")
        return out

    @contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Follow which of a module's parts are executed, within."""
        start, handles = _other_states(), []
        self.path = [("", module)]

        def enter(name: str) -> Any:
            def hook(part: nn.Module, inputs: tuple[Any, ...]) -> None:
                self.path.append((name, part))
                if isinstance(part, nn.Embedding | nn.EmbeddingBag) and inputs and isinstance(inputs[0], Tensor):
                    _check_ids(name, part, inputs[0])

            return hook

        def leave(part: nn.Module, inputs: Any, output: Any) -> None:
            if _other_states() != start:
                raise self._refusal("random or numpy.random", "which have no keys")
            self.path.pop()

        for name, part in module.named_modules():
            if part is not module:
                handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)]
        try:
            yield
            if _other_states() != start:
                raise self._refusal("random or numpy.random", "which have no keys")
        finally:
            random.setstate(start[0])
            for handle in handles:
                handle.remove()

    def _refusal(self, draws: str, why: str) -> InputError:
        """Return the error that names the module that draws, and what to set."""
        name, part = self.path[-1]
        kind = type(part).__name__
        rates = [
            f"{rate} = 0 instead of {value:g}"
            for rate, value in vars(part).items()
            if isinstance(value, float) and 0 < value <= 1 and any(word in rate.lower().split("_") for word in RATES)
        ]
        remedy = f"set its {' and '.join(rates)}" if rates else "leave it out, or use nn.Dropout"
        shown = Shown(f"{name} ({kind})" if name else kind)
        return InputError("model", shown, f"free of randomness without a key: it draws by {draws}, {why}; {remedy}")


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


def hidden_buffers(module: nn.Module) -> Params:
    """Return copies of the buffers that a state dict leaves out."""
    state = set(module.state_dict())
    return {name: value.clone() for name, value in module.named_buffers() if name not in state}


def _check_ids(name: str, part: nn.Embedding | nn.EmbeddingBag, ids: Tensor) -> None:
    """Refuse ids that an embedding does not have; on a GPU the failure itself could not be caught."""
    low, high = (int(end) for end in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if ids.is_floating_point() or 0 <= low <= high < part.num_embeddings:
        return
    wrong = low if low < 0 else high
    raise InputError("data", Shown(f"the id {wrong}"), f"from 0 to {part.num_embeddings - 1}, as {name} of the model has")


def _torch_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _other_states() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, words.tobytes(), *rest  # type: ignore[union-attr]
