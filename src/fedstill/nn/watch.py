"""Watch a pass through a model: where it draws random numbers that have no key, and what it is given that it cannot take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import InputError, Shown
from .draws import NoKey
from .mode import AS_WRITTEN, ExecutionMode

RATES = ("drop", "prob", "rate", "noise", "jitter", "p")  # what attributes are called that turn randomness off at 0


class Watch(ExecutionMode):
    """Executes a model as it is written, and refuses what a run could not repeat, by the module that does it."""

    def __init__(self, key: Tensor | None, device: torch.device) -> None:
        super().__init__(key, None, AS_WRITTEN)
        self.device = device
        self.written: set[str] = set()  # the buffers that the pass wrote to
        self.path: list[tuple[str, nn.Module]] = []  # the modules that are being executed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _torch_states(self.device)
        name = getattr(func, "__name__", str(func))
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        except NoKey:
            raise self._refusal(f"torch's {name}", "in evaluation") from None
        if not all(map(torch.equal, before, _torch_states(self.device))):
            raise self._refusal(f"torch's {name}", "which has no keyed form")
        return out

    @contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Follow which of a module's parts are executed, within."""
        start, handles = _other_states(), []
        python, numpy = random.getstate(), np.random.get_state()
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
            random.setstate(python)
            np.random.set_state(numpy)
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


def _check_ids(name: str, part: nn.Embedding | nn.EmbeddingBag, ids: Tensor) -> None:
    """Refuse ids that an embedding does not have; on a GPU the failure itself could not be caught."""
    low, high = (int(end) for end in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if ids.is_floating_point() or 0 <= low <= high < part.num_embeddings:
        return
    wrong = low if low < 0 else high
    raise InputError(
        "data", Shown(f"the id {wrong}"), f"from 0 to {part.num_embeddings - 1}, as {name} of the model has"
    )


def _torch_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _other_states() -> tuple[Any, ...]:
    """Return the states of Python's generator and of numpy's global one, to compare."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
