"""A plain `nn.Module` as a pure function of its parameters, the same for one client and for a stack of them.

The module is never changed: a private copy serves as a skeleton into which each call puts the tensors it is given. A torch
function mode (`mode.py`), active only where the model needs it, replaces some operations:

- dropout, stochastic depth and other noise of training draw from (seed, round, client, step, layer), not from a global
  generator (`draws.py`);
- BatchNorm leaves padding out of its statistics (and survives a batch of one sample: its variance is then 0);
- in a stack, convolutions with weights for each client use the algorithm that was measured to be fastest; one client's 5×5
  convolutions on a CPU use Winograd's algorithm;
- within `torch.func` attention is plain products and recurrent layers go step by step, since the fused kernels cannot be
  vmapped; encoder layers have no fast path in evaluation, whose numbers are others;
- with `bf16`, convolutions and linear layers multiply bfloat16 numbers and activations stay in bfloat16; weights, their updates,
  BatchNorm's statistics and the logits keep their precision.

Which of these apply is an `Execution`, fixed when a view of the net is made (`Net.under`).

The output may be a tensor, what has `.logits`, a mapping with "logits", or a tuple that begins with it.

Running statistics are updated in place on the tensors that were passed in; callers pass copies.

What training never changes is in no tree: parameters that are frozen (`requires_grad` false) and buffers that a training pass
leaves alone, as position ids. They exist once, as the skeleton's own tensors (`constants`). BatchNorm's statistics move wherever
the layer is in training mode, as in torch: also where its weight and bias are frozen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InputError, Shown, first_line
from ..core.tree import Params
from .channels import Channels, follow
from .constants import Constants, slots, written
from .mode import AS_WRITTEN, Execution, ExecutionMode, transformed
from .pool_first import Forward, pool_first
from .probe import Output, logits_of, look
from .watch import Watch

FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class Net:
    """The model as a function: `net(params, x, ...)`.

    `parameters` are the names that training may move, in `named_parameters()` order; `buffers` the other entries of the
    state that a training pass changes (running statistics). `params` dictionaries hold both. `constants` are the rest of the
    state, known once `probe` has looked; until then they are buffers.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, frozen: Collection[str] = ()
    ) -> None:
        """`frozen` names parameters that nobody trains, besides those whose `requires_grad` is false."""
        try:
            self.module = copy.deepcopy(module).to(device)
            complex_names = [n for n, v in self.module.state_dict().items() if v.numel() and v.is_complex()]
        except Exception as error:
            reason = first_line(error)
            raise InputError(
                "model", Shown(type(module).__name__), f"a module that can be copied ({reason})"
            ) from error
        if complex_names:
            raise InputError("model", Shown(complex_names[0]), "a module with real numbers only")
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in frozen:
                parameter.requires_grad_(False)
        self._training, self._evaluating = (copy.deepcopy(self.module).train(mode) for mode in (True, False))
        both = {True: self._training, False: self._evaluating}
        self._recurrent = {t: [p for p in m.modules() if isinstance(p, nn.RNNBase)] for t, m in both.items()}
        self.parameters = tuple(n for n, p in self.module.named_parameters() if p.requires_grad)
        state = self.module.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, value in state.items():
            first.setdefault(id(value), name)
        self._tied = {name: first[id(value)] for name, value in state.items()}
        self._all_slots = {train: slots(m, self._tied) for train, m in both.items()}
        self._settle(())
        norms = [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.has_batchnorm = bool(norms)
        self.cumulative = any(m.momentum is None and m.track_running_stats for m in norms)
        self.has_fast_path = any(isinstance(m, FAST_PATHS) for m in self.module.modules())
        self.has_draws = self.has_composites = True  # until `probe` has looked
        self.axes: dict[int, int] = {}  # of draws whose first axis is not the samples'
        self.outputs = 0
        self.device, self.dtype = device, dtype
        self._channels: Channels | None = None
        self.size = sum(p.numel() for p in self.module.parameters())
        self.has_convolution = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in self.module.modules())
        self.execution = AS_WRITTEN
        self._heads: dict[tuple[str, ...], tuple[bool, tuple[int, ...]]] = {}  # see `head`
        self._rewritten: dict[bool, Forward] = {}  # by training mode: what runs instead of the module's own forward

    def initial(self) -> Params:
        """Return a copy of the weights that the module came with, without the constants."""
        state = self.module.state_dict()
        return {name: state[name].detach().clone() for name in self.names}

    def export(self, params: Params) -> Params:
        """Return a full state dict on the CPU for `module.load_state_dict` (tied weights under all their names)."""
        full = {**self.constants, **params}
        plain = torch.contiguous_format
        return {n: full[source].detach().cpu().clone(memory_format=plain) for n, source in self._tied.items()}

    # ---- constants ---------------------------------------------------------------------------------------------------
    def _settle(self, constants: Collection[str]) -> None:
        """Make these entries of the state constants: the tensors of `module`, which both skeletons share from now on."""
        state = self.module.state_dict(keep_vars=True)
        own = [name for name in state if self._tied[name] == name]
        places = [slot for both in self._all_slots.values() for slot in both]
        self.fixed = Constants({name: state[name] for name in own if name in constants}, places)
        self.names = tuple(name for name in own if name not in self.constants)
        self.buffers = tuple(name for name in self.names if name not in self.parameters)
        self._slots = {train: [s for s in all if s[0] not in self.constants] for train, all in self._all_slots.items()}

    @property
    def constants(self) -> Params:
        """The entries of the state that are in no tree."""
        return self.fixed.tensors

    def channels(self) -> Channels:
        """Return the model's layers by channel; its graph is followed once."""
        if self._channels is None:
            self._channels = follow(copy.deepcopy(self.module), self.example)
        return self._channels

    def under(self, execution: Execution, rewrite: Callable[[nn.Module], Forward | None] = pool_first) -> Net:
        """Return a view that is executed this way: it shares the skeleton, and this net stays as it is.

        `rewrite` makes what `execution.pool_first` asks for. It is used only where it gives the same bits on the samples that
        `probe` has seen.
        """
        view = copy.copy(self)
        view.execution, view._rewritten = execution, {}
        for value in self.constants.values():
            value.data = view.fast_layout(value.data)  # they stay the same tensors
        if execution.pool_first and self.outputs:
            for train in (True, False):
                forward = rewrite(copy.deepcopy(self.module).train(train))
                if forward is not None and view._gives_the_same(train, forward):
                    view._rewritten[train] = forward
        return view

    def _gives_the_same(self, train: bool, forward: Forward) -> bool:
        """Return whether output, gradients and buffers are the same bits as those of the module as it is written."""
        plain, trial = copy.copy(self), copy.copy(self)
        plain._rewritten, trial._rewritten = {}, {train: forward}
        try:
            expected, results = plain._slopes(train), trial._slopes(train)
        except Exception:
            return False
        return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    def _slopes(self, train: bool) -> list[Tensor]:
        """Return, on an example from the initial weights, the output, gradients of a sum of it, and the state after it."""
        spare = self.fixed.copies_of_buffers()  # so that a wrong rewriting spoils nothing
        with torch.enable_grad(), self.fixed.replaced({**self.constants, **spare}):
            params = {name: self.fast_layout(value) for name, value in self.initial().items()}
            weights = [params[name].requires_grad_() for name in self.parameters]
            key = torch.zeros((), dtype=torch.int64, device=self.device)
            out = self(params, self.example, train=train, key=key)
            uneven = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out.dtype)
            slopes = torch.autograd.grad((out * uneven).sum(), weights, allow_unused=True, materialize_grads=True)
        return [out, *slopes, *params.values(), *spare.values()]

    def fast_layout(self, value: Tensor) -> Tensor:
        """Return an entry of the state in the memory layout in which convolutions are fastest; its values do not change."""
        if self.execution.channels_last and value.ndim == 4:
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
        """Return the module's output. In training `key` makes the dropout masks; `mask` marks padding.

        `taps` is filled with the input of each module that it names; `gates` multiply the inputs of those they name.
        """
        if taps or gates:
            with self._hooked(train, taps or {}, gates or {}):
                return self._forward(params, x, train, self._mode(key, mask, train, len(x)), as_written=True)
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
        """Return the output for (flattened) inputs of the head, whose modules are named.

        A head that is a single module at the model's end is called alone. Otherwise the whole model runs on zeros, with the
        features in place of its first head module's input.
        """
        if modules not in self._heads:
            taps: dict[str, Tensor] = {modules[0]: self.example}
            with torch.no_grad():
                out = self(self.initial(), self.example, train=False, taps=taps)
                last = self._evaluating.get_submodule(modules[0])
                alone = len(modules) == 1 and torch.equal(out, last(taps[modules[0]]))
            self._heads[modules] = alone, tuple(taps[modules[0]].shape[1:])
        alone, shape = self._heads[modules]
        inputs = features.reshape(features.shape[0], *shape)
        mode = self._mode(key, mask, train, len(inputs))
        if alone:
            head = (self._training if train else self._evaluating).get_submodule(modules[0])
            return self._forward(params, inputs, train, mode, head)
        zeros = self.example[:1].expand(len(inputs), *self.example.shape[1:]) * 0
        with self._hooked(train, {}, {}, {modules[0]: inputs}):
            return self._forward({**self.initial(), **params}, zeros, train, mode, as_written=True)

    def _mode(self, key: Tensor | None, mask: Tensor | None, train: bool, rows: int) -> ExecutionMode | None:
        """Return the mode to run in; None where the model as written does the same, which is faster."""
        execution = self.execution
        keyed = train and (self.has_draws or (self.has_batchnorm and (mask is not None or rows == 1)))
        plain = (self.has_composites or self.has_draws) and (execution.plain or transformed())
        lowered = execution.lowering is not None or execution.bf16 or execution.winograd is not None
        if not (keyed or plain or lowered or self.has_fast_path):
            return None
        return ExecutionMode(key, mask, execution, self.axes)

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
            def look(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
                if instead and name in instead:
                    return (instead[name], *inputs[1:])
                if name in taps:
                    taps[name] = inputs[0].to(self.dtype)
                return (inputs[0] * gates[name], *inputs[1:]) if name in gates else None

            return look

        for name in {*taps, *gates, *(instead or {})}:
            handles.append(module.get_submodule(name).register_forward_pre_hook(hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(
        self,
        params: Params,
        x: Tensor,
        train: bool,
        mode: ExecutionMode | None,
        submodule: nn.Module | None = None,
        as_written: bool = False,  # for hooks, which see the model as it is written
    ) -> Tensor:
        for name, owner, leaf in self._slots[train]:
            if submodule is None or name in params:
                owner[leaf] = params[name]
        for layer in self._recurrent[train]:  # these keep a second list of their weights
            layer._flat_weights = [getattr(layer, n) for n in layer._flat_weights_names]
        module = submodule or (self._training if train else self._evaluating)
        forward = self._rewritten.get(train) if submodule is None and not as_written else None
        call = module if forward is None else functools.partial(forward, module)
        with contextlib.nullcontext() if mode is None else mode:
            out = call(x)
        if self.fixed.buffers:
            self.fixed.check()
        out = out if isinstance(out, Tensor) else logits_of(out)
        return out.to(self.dtype) if self.execution.bf16 else out

    # ---- before any work -----------------------------------------------------------------------------------------------
    def probe(self, x: Tensor, output: tuple[int, ...], exact: bool = False) -> None:
        """Run one and two samples through the model and refuse what cannot be trained reproducibly, before any work.

        `output` is the shape that a sample's output should have; unless `exact`, the last number may be larger.
        """
        self._settle(())
        seen = look(self, x, Output(output, exact), self.dtype)
        self.example, self.outputs, self.axes = seen.example, seen.outputs, seen.axes
        self.has_draws, self.has_composites = seen.draws, seen.composites
        self.has_batchnorm = self.has_batchnorm or seen.norms  # also one that a forward pass calls by itself
        self._settle(set(self.buffers) - seen.written)

    def watched(self, x: Tensor, train: bool) -> tuple[Any, Watch]:
        """Run a pass from the initial weights under a watch; return the output and the watch."""
        params, before = self.initial(), self.initial()
        watch = Watch(torch.zeros((), dtype=torch.int64, device=x.device) if train else None, x.device)
        with watch.over(self._training if train else self._evaluating):
            out = self._forward(params, x, train, watch)
        for name, owner, leaf in self._slots[train]:
            if owner[leaf] is not params[name]:
                right = "updated in place (copy_, mul_, add_): an assignment in forward would be lost"
                raise InputError("model", Shown(f"buffer {name}"), right)
        watch.written = written(self.buffers, before, params, watch.statistics)
        return out, watch

    def hidden(self) -> Params:
        """Return copies of the buffers that a state dict leaves out, as training passes left them."""
        state = set(self._training.state_dict())
        return {name: value.clone() for name, value in self._training.named_buffers() if name not in state}

    def twin(self, dtype: torch.dtype) -> Net:
        """Return a net of the same module in another precision, with the same constants and what `probe` has found."""
        twin = Net(self.module, self.device, dtype)
        twin.has_draws, twin.has_composites, twin.has_batchnorm = (
            self.has_draws,
            self.has_composites,
            self.has_batchnorm,
        )
        twin.axes, twin.outputs = self.axes, self.outputs
        twin._settle(self.constants)
        return twin
