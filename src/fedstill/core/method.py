"""The contract of a method.

A method is a frozen dataclass: its fields are its hyper-parameters (typed, documented and checked, so they are also its
flags and its TOML), its hooks are pure functions on trees of tensors. Hooks marked *client* are written for one client and
run for one or for a whole stack of them (`torch.func.vmap`), so they never branch in Python on a client's tensor: they use
`torch.where` or a mask. Nothing that matters lives in `self`, and no hook changes its arguments.

One round: `send` → (at each participant: `begin`, the phases, `finish`) → `merge`. What a hook may know besides its arguments is
in the `Task`: the model, the settings of local work, at a client its own data and whether it has trained before (`task.seen`),
and the server's mean (`task.average`). What a method keeps lies in the server's state and in each client's memory, both trees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from . import contract, settings
from .batch import Batch
from .closed import CROSS_ENTROPY, ClosedForm
from .errors import HookError
from .task import Loss, Phase, Task, Upload
from .tree import Params, Tree

__all__ = ["Loss", "Method", "Phase", "Upload"]


class Frozen:
    """Refuses attributes, also of a class without a decorator, which a frozen dataclass does not do for its heirs."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


@dataclass(frozen=True, kw_only=True)
class Method(Frozen):
    """What every method has. Derive from `FedAvg` (one step) and override what differs."""

    id: ClassVar[str] = ""  # its name on the command line and in TOML
    paper: ClassVar[str] = ""
    scores: ClassVar[tuple[str, ...]] = ("generic",)  # which models it trains: "generic", "personal" or both
    trains_generic: ClassVar[bool] = True
    """Whether the generic model as a whole is trained; where not, the mean of the personal models can be scored in its place."""
    needs_head: ClassVar[bool] = False
    needs_classes: ClassVar[str] = ""
    """Why it works with classification alone, in words that complete "fedrod, which …"; empty: with every objective."""
    needs_lora: ClassVar[bool] = False  # whether it is about LoRA's adapters
    averages: ClassVar[bool] = (
        False  # whether `merge` puts a plain mean into "params", which a server optimizer may follow
    )
    robust: ClassVar[bool] = True
    """Whether what `merge` asks `task.average` for are means for everybody, which a robust rule can replace."""
    noisy_mean: ClassVar[bool] = False
    """Whether `merge` uses the uploads in one call of `task.average`, around the server's "params", and nowhere else, so that
    noise in this mean covers all that the server learns."""
    noisy_steps: ClassVar[bool] = False
    """Whether a client's data reach its upload only through gradients of `loss` in phases of "params", sample by sample, so that
    DP-SGD there covers all that goes up. Phases of other models and what `finish` keeps must not reach it otherwise either."""
    personal_passes: ClassVar[float] = 0.0
    """Where `step` trains two models: passes over the data for the personal one, which nothing that goes up depends on, for each
    pass for the other."""
    personal_gradients: ClassVar[bool] = False
    """Whether `personal` takes gradients over the client's data, which then a stacked engine does for many clients at once."""
    wait_free: ClassVar[bool] = False
    """Whether phases of other models than `params` come last and nothing that goes up depends on them, so that they can run
    after the upload has left."""
    per_sample: ClassVar[frozenset[str]] = frozenset()
    """Entries of the memory with one row for each of the client's samples."""
    upload_varies: ClassVar[bool] = False
    """Whether names or shapes of what `finish` uploads differ from round to round."""
    coupled: ClassVar[frozenset[str]] = frozenset()
    """Entries of the memory that must agree with the server's state: they are rolled back when the server did not take the
    reply (it was late, dropped or refused). All other entries are the client's own and stay."""

    def __init_subclass__(cls) -> None:
        """Clear flags that describe an overridden hook; refuse a field that would hide a hook.

        `averages` and `noisy_mean` describe `merge`; `noisy_steps`, `wait_free` and `personal_passes` describe a client's round;
        `personal_gradients` describes `personal`, `closed_form` the objective. Overriding a hook, also by a mixin, clears what
        describes it; restate it. A misspelt hook, a wrong signature and a value that is no field are refused as well
        (`core.contract`).
        """
        contract.check_class(cls, Method)
        if _differs(cls, "averages", "merge"):
            cls.averages = False
        if _differs(cls, "noisy_mean", "merge"):
            cls.noisy_mean = False
        if _differs(cls, "noisy_steps", "init_client", "begin", "phases", "fit", "loss", "correct", "step", "finish"):
            cls.noisy_steps = False
        if _differs(cls, "wait_free", "begin", "phases", "step", "finish"):
            cls.wait_free = False
        if _differs(cls, "personal_passes", "begin", "step", "finish"):
            cls.personal_passes = 0.0
        if _differs(cls, "personal_gradients", "personal"):
            cls.personal_gradients = False
        if _differs(cls, "closed_form", "fit", "loss", "correct", "step"):
            cls.closed_form = not_known  # type: ignore[method-assign]
        hidden = [n for n in inspect.get_annotations(cls) if callable(getattr(Method, n, None))]
        if hidden:
            raise HookError(f"{cls.__name__}.{hidden[0]}: a field needs another name than the hook {hidden[0]}()")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class that was not decorated, whose fields are none."""
        contract.check_decorated(cls, Method)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        settings.check(self)

    def check(self, task: Task) -> None:
        """Refuse a model or setting that the method cannot work with, before training starts."""
        if self.needs_head:
            task.need_split()

    # ---- state -------------------------------------------------------------------------------------------------------
    def init_server(self, task: Task, params: Params) -> Tree:
        """Return the server's state before round 1."""
        raise self._missing("init_server")

    def init_client(self, task: Task, params: Params) -> Tree:
        """Return a client's memory before its first round. It never leaves unless `finish` puts it into the upload."""
        return {}

    def freezes(self, parameters: Sequence[str]) -> frozenset[str]:
        """Return which of the model's parameters nobody ever trains: they exist once, are in no tree, and do not travel."""
        return frozenset()

    def private(self, task: Task) -> frozenset[str]:
        """Return the names of the model's state that never leave a client (checked by the laws)."""
        return frozenset()

    # ---- a round -----------------------------------------------------------------------------------------------------
    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """Return all that goes down to a client."""
        raise self._missing("send")

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """*Client.* Return where local work begins: a tree with an entry for each model that a phase trains."""
        raise self._missing("begin")

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Return the local work, in order."""
        return (Phase(),)

    def fit(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """*Client.* Return the data term: the objective's loss."""
        return task.fit(task.logits(params, batch), batch)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """*Client.* Return the objective of a phase that does not bring its own."""
        return self.fit(task, params, batch)

    def closed_form(self, task: Task, local: Tree) -> ClosedForm | None:
        """*Client.* Return the objective of such a phase as terms whose gradients are known; None where it is no sum of these.

        It is for speed alone, for one client at a time: `loss` or `step` is what counts, and what this is compared with.
        """
        return CROSS_ENTROPY

    def correct(self, task: Task, local: Tree, grads: Params) -> Params:
        """*Client.* Return the gradient that SGD is given, from the loss's own."""
        return grads

    step: ClassVar[Callable[..., tuple[Tree, Tensor]] | None] = None
    """*Client.* `step(task, local, batch) -> local, loss`: the whole step, where a gradient of a loss is not enough."""

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """*Client.* Return all that goes up, and the new memory."""
        raise self._missing("finish")

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """Return the server's next state; the uploads come in ascending order of their clients."""
        raise self._missing("merge")

    # ---- what is scored and exported ---------------------------------------------------------------------------------
    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """*Client.* Return the client's own model, given what it would download now; `task.here()` is its training data."""
        raise self._missing("personal")

    def generic(self, task: Task, server: Tree) -> Params:
        """Return the one model for everybody."""
        raise self._missing("generic")

    def _missing(self, hook: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {hook}(): derive from FedAvg, or write it")


def not_known(self: Method, task: Task, local: Tree) -> ClosedForm | None:
    """Return no closed form: the hooks that it described are others."""
    return None


def _differs(cls: type, flag: str, *hooks: str) -> bool:
    """Return whether a hook differs from that of the class which last set the flag."""
    setter = next(kind for kind in cls.__mro__ if flag in vars(kind))
    return any(inspect.getattr_static(cls, hook) is not inspect.getattr_static(setter, hook) for hook in hooks)
