"""A plain `nn.Module` as a pure function of its parameters, the same for one client and for a stack of them.

The module is never changed: a private copy serves as a skeleton into which each call puts the tensors it was given. Some
things are taken out of the module's hands, by a function mode (`keyed.py`) that is active only where the model needs it:

- dropout draws its mask from (seed, round, client, step, layer), not from a global generator;
- BatchNorm leaves padding out of its statistics (and survives a batch of one sample: its variance is then 0);
- in a stack, convolutions with a weight for each client are done in the way that was measured to be fastest; one client's 5×5
  convolutions on a CPU are done by Winograd's algorithm;
- with `bf16`, convolutions and linear layers multiply bfloat16 numbers and activations stay in bfloat16; weights, their updates,
  BatchNorm's statistics and the logits keep their precision.

Running statistics are updated in place on the tensors that were passed in; callers pass copies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..core.errors import InputError, Shown, first_line
from ..core.tree import Params
from .channels import Channels, follow
from .kernels.convolution import Lowering
from .mode import Keyed
from .pool_first import Forward, pool_first

Slot: TypeAlias = tuple[str, dict[str, Tensor | None], str]


class Net:
    """The model as a function: `net(params, x, ...)`.

    `parameters` are the names that training may move, in `named_parameters()` order; `buffers` the other entries of the
    state (running statistics, and parameters that the user froze). `params` dictionaries hold both.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        try:
            self.module = copy.deepcopy(module).to(device)
            complex_ = [n for n, v in self.module.state_dict().items() if v.numel() and v.is_complex()]
        except Exception as error:
            reason = first_line(error)
            raise InputError(
                "model", Shown(type(module).__name__), f"a module that can be copied ({reason})"
            ) from error
        if complex_:
            raise InputError("model", Shown(complex_[0]), "a module with real numbers only")
        for part in (*self.module.parameters(), *self.module.buffers()):
            if part.is_floating_point():
                part.data = part.data.to(dtype)
        self._training, self._evaluating = (copy.deepcopy(self.module).train(mode) for mode in (True, False))
        both = {True: self._training, False: self._evaluating}
        self._recurrent = {t: [p for p in m.modules() if isinstance(p, nn.RNNBase)] for t, m in both.items()}
        self.parameters = tuple(n for n, p in self.module.named_parameters() if p.requires_grad)
        state = self.module.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, value in state.items():
            first.setdefault(id(value), name)
        self._tied = {name: first[id(value)] for name, value in state.items()}
        self._slots = {train: _slots(m, self._tied) for train, m in both.items()}
        self.buffers = tuple(n for n in state if self._tied[n] == n and n not in self.parameters)
        self.names = tuple(n for n in state if self._tied[n] == n)
        norms = [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.has_batchnorm = bool(norms)
        self.cumulative = any(m.momentum is None and m.track_running_stats for m in norms)
        self.has_dropout, self.outputs = True, 0  # until `probe` has looked
        self.device, self.dtype = device, dtype
        self._channels: Channels | None = None
        self.size = sum(p.numel() for p in self.module.parameters())
        self.has_convolution = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in self.module.modules())
        self.channels_last = False  # set where it pays: a CPU that takes clients one by one
        self.lowering: Lowering | None = None  # set by the engine that stacks clients
        self.bf16 = False
        self.winograd = False  # set where it pays: 5×5 convolutions of clients that train one by one on a CPU
        self._direct: dict[tuple[str, ...], bool] = {}
        self._rewritten: dict[bool, Forward] = {}  # by training: what runs instead of the module's own forward

    def initial(self) -> Params:
        """A copy of the weights that the module came with."""
        state = self.module.state_dict()
        return {name: state[name].detach().clone() for name in self.names}

    def export(self, params: Params) -> Params:
        """A full state dict on the CPU that `module.load_state_dict` takes (tied weights under all their names)."""
        return {name: params[source].detach().cpu().clone() for name, source in self._tied.items()}

    def channels(self) -> Channels:
        """The model's layers by channel, followed once."""
        if self._channels is None:
            self._channels = follow(copy.deepcopy(self.module), self.example)
        return self._channels

    def _try(self, x: Tensor, mode: Keyed) -> tuple[Tensor, Params]:
        """A training pass from the initial weights: its output, and the state after it."""
        params = self.initial()
        out = self._forward(params, x, True, mode)
        for name, owner, leaf in self._slots[True]:
            if owner[leaf] is not params[name]:
                right = "updated in place (copy_, mul_, add_): an assignment in forward would be lost"
                raise InputError("model", Shown(f"buffer {name}"), right)
        return out, params

    def rewrite(self, wanted: bool) -> None:
        """Run the model with max-pooling before ReLU (see `rewrite`) where that gives the same bits, or as it is written."""
        self._rewritten = {}
        if not wanted or not self.outputs:  # it is tried on what `probe` has seen
            return
        for train in (True, False):
            forward = pool_first(copy.deepcopy(self.module).train(train))
            if forward is not None and self._same(train, forward):
                self._rewritten[train] = forward

    def _same(self, train: bool, forward: Forward) -> bool:
        """Whether output, gradients and buffers are the same bits as those of the module as it is written."""
        try:
            written, ours = self._slopes(train, {}), self._slopes(train, {train: forward})
        except Exception:
            return False
        return all(torch.equal(a, b) for a, b in zip(ours, written, strict=True))

    def _slopes(self, train: bool, rewritten: dict[bool, Forward]) -> list[Tensor]:
        """On an example, from the initial weights: the output, the gradients of a sum of it, and the state after it."""
        kept, self._rewritten = self._rewritten, rewritten
        try:
            with torch.enable_grad():
                params = {name: self.fast_layout(value) for name, value in self.initial().items()}
                weights = [params[name].requires_grad_() for name in self.parameters]
                key = torch.zeros((), dtype=torch.int64, device=self.device)
                out = self(params, self.example, train=train, key=key)
                uneven = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out.dtype)
                slopes = torch.autograd.grad((out * uneven).sum(), weights, allow_unused=True, materialize_grads=True)
        finally:
            self._rewritten = kept
        return [out, *slopes, *params.values()]

    def fast_layout(self, value: Tensor) -> Tensor:
        """An entry of the state in the memory layout that convolutions are fastest in here; its values do not change."""
        if self.channels_last and value.ndim == 4:
            # A copy, since a kernel with one input channel is contiguous in both layouts, and `contiguous` would leave it.
            return value.clone(memory_format=torch.channels_last)
        return value

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
        """The module's output. In training `key` makes the dropout masks; `mask` marks padding.

        `taps` is filled with the input of each module that it names; `gates` multiply the inputs of those they name.
        """
        if taps or gates:
            with self._hooked(train, taps or {}, gates or {}):
                return self(params, x, train=train, key=key, mask=mask)
        return self._forward(params, x, train, self._mode(key, mask, train, len(x)))

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
        """The output for given features: what the head, whose modules are named, makes of its (flattened) input.

        A head that is one module at the model's end is called alone. Elsewhere the whole model runs, on zeros, and the features
        take the place of what the head's first module was given.
        """
        taps: dict[str, Tensor] = {modules[0]: self.example}
        if modules not in self._direct:
            with torch.no_grad():
                out = self(self.initial(), self.example, train=False, taps=taps)
                self._direct[modules] = len(modules) == 1 and torch.equal(
                    out, self._evaluating.get_submodule(modules[0])(taps[modules[0]])
                )
            self._head_input = tuple(taps[modules[0]].shape[1:])
        given = features.reshape(features.shape[0], *self._head_input)
        mode = self._mode(key, mask, train, len(given))
        if self._direct[modules]:
            part = (self._training if train else self._evaluating).get_submodule(modules[0])
            return self._forward(params, given, train, mode, part)
        zeros = self.example[:1].expand(len(given), *self.example.shape[1:]) * 0
        with self._hooked(train, {}, {}, {modules[0]: given}):
            return self._forward({**self.initial(), **params}, zeros, train, mode)

    def _mode(self, key: Tensor | None, mask: Tensor | None, train: bool, rows: int) -> Keyed | None:
        keyed = train and (self.has_dropout or mask is not None or (self.has_batchnorm and rows == 1))
        if not keyed and self.lowering is None and not self.bf16 and not self.winograd:
            return None
        return Keyed(key, mask, self.lowering, self.bf16, self.winograd)

    @contextlib.contextmanager
    def _hooked(
        self,
        train: bool,
        taps: dict[str, Tensor],
        gates: Mapping[str, Tensor],
        instead: Mapping[str, Tensor] | None = None,
    ) -> Iterator[None]:
        module = self._training if train else self._evaluating
        handles = []

        def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
            def look(part: nn.Module, given: tuple[Any, ...]) -> Any:
                if instead and name in instead:
                    return (instead[name], *given[1:])
                if name in taps:
                    taps[name] = given[0].to(self.dtype)
                return (given[0] * gates[name], *given[1:]) if name in gates else None

            return look

        for name in {*taps, *gates, *(instead or {})}:
            handles.append(module.get_submodule(name).register_forward_pre_hook(hook(name)))
        kept, self._rewritten = self._rewritten, {}  # hooks see the model as it is written
        try:
            yield
        finally:
            self._rewritten = kept
            for handle in handles:
                handle.remove()

    def _forward(
        self, params: Params, x: Tensor, train: bool, mode: Keyed | None, part_of: nn.Module | None = None
    ) -> Tensor:
        for name, owner, leaf in self._slots[train]:
            if part_of is None or name in params:
                owner[leaf] = params[name]
        for part in self._recurrent[train]:  # these keep a second list of their weights
            part._flat_weights = [getattr(part, n) for n in part._flat_weights_names]
        module = part_of or (self._training if train else self._evaluating)
        forward = self._rewritten.get(train) if part_of is None else None
        call = module if forward is None else functools.partial(forward, module)
        if mode is None:
            return call(x)
        with mode:
            out: Tensor = call(x)
        return out.to(self.dtype) if self.bf16 else out

    def probe(self, x: Tensor, classes: int) -> None:
        """Run one and two samples through the model and refuse what cannot be trained reproducibly, before any work."""
        name = Shown(type(self.module).__name__)
        pair = torch.cat([x[:1], x[:1]]) if len(x) < 2 else x[:2]
        watch = Keyed(torch.zeros((), dtype=torch.int64, device=x.device), None)
        hidden = _hidden_buffers(self._training)
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []), torch.no_grad():
            before = _generator_state(x.device)
            try:
                logits, params = self._try(pair, watch)
                lone, _ = self._try(pair[:1], Keyed(watch.key, None))
                scored, alone = self(params, pair, train=False), self(params, pair[:1], train=False)
            except InputError:
                raise
            except Exception as error:
                shape = "×".join(map(str, x.shape[1:]))
                reason = first_line(error)
                raise InputError("model", name, f"a model that takes samples of shape {shape} ({reason})") from error
            if not torch.equal(before, _generator_state(x.device)):
                right = "free of randomness other than nn.Dropout and nn.Dropout1d/2d/3d in training"
                raise InputError("model", name, right)
        for rows, out in ((2, logits), (1, lone), (2, scored), (1, alone)):
            if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != rows or out.shape[1] < classes:
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                right = f"a model with an output of shape [batch, {classes}]"
                raise InputError("model", Shown(f"{name} with output {got} for {rows} samples"), right)
        slack = 1e-9 if scored.dtype == torch.float64 else 1e-3
        if (scored[:1] - alone).abs().max() > slack * (1 + alone.abs().max()):
            right = (
                "one whose evaluation takes each sample by itself (BatchNorm with track_running_stats=True, for one)"
            )
            raise InputError("model", name, right)
        changed = [n for n, v in _hidden_buffers(self._training).items() if not torch.equal(v, hidden[n])]
        if changed:
            right = "persistent if training changes it: what a state dict leaves out would be lost"
            raise InputError("model", Shown(f"buffer {changed[0]}"), right)
        self.has_dropout, self.example = watch.dropouts > 0, pair
        self.outputs = int(logits.shape[1])


def _slots(module: nn.Module, tied: dict[str, str]) -> list[Slot]:
    """Where each entry of the state sits: the name it is kept under, the owner's dictionary, and the key there."""
    slots: list[Slot] = []
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in module.state_dict(keep_vars=True):
        path, _, leaf = name.rpartition(".")
        owner = modules[path]
        slots.append((tied[name], owner._parameters if leaf in owner._parameters else owner._buffers, leaf))
    return slots


def _hidden_buffers(module: nn.Module) -> Params:
    """Copies of the buffers that a state dict leaves out."""
    kept = set(module.state_dict())
    return {name: value.clone() for name, value in module.named_buffers() if name not in kept}


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
