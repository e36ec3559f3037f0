"""LoRA: low-rank adapters beside frozen weights, as a parametrisation of plain torch modules.

    W = W₀ + s·B·A        A ∈ R^{r×in},  B ∈ R^{out×r},  s = α/r, or α/√r with scaling=rs (rsLoRA)

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; Kalajdzievski, "A Rank Stabilization Scaling Factor
for Fine-Tuning with LoRA", 2023. A is uniform in ±1/√in (Kaiming with a = √5), drawn from the seed; B = 0, so an adapted model
begins as the model that it was made of.

An adapted layer has two more entries in the state dict, `lora_A` and `lora_B`; its own keep their names. Reading its `weight`
(`in_proj_weight` of an attention) gives W, so whoever reads it is right: attention, and torch's fast paths for evaluation. The
layer's own forward pass adds s·B·(A·x) to the output of W₀ instead: W₀ is never copied, and stays one tensor for all clients.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import plan, settings
from ..core.errors import InputError, Shown, nearest
from ..core.settings import setting
from ..core.tree import Params

A, B = "lora_A", "lora_B"
ALL_LINEAR = "all-linear"
FORM = "r=8,alpha=16,targets=query+value; also dropout=0.1, head=freeze, scaling=rs"
Kind: TypeAlias = Literal["linear", "transposed", "attention"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which layers are adapted, and how."""

    r: int = setting(8, "rank", least=1)
    alpha: float = setting(16.0, "α: the product is scaled by α/r", above=0)
    targets: tuple[str, ...] = setting((ALL_LINEAR,), "modules by name, end of a name or pattern; or all-linear")
    dropout: float = setting(0.0, "of the adapters' inputs", least=0, most=1)
    head: Literal["train", "freeze"] = setting("train", "whether the head trains beside the adapters")
    scaling: Literal["plain", "rs"] = setting("plain", "α/r, or α/√r")

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.r if self.scaling == "plain" else math.sqrt(self.r))

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Return what a text such as r=8,alpha=16,targets=query+value describes."""
        kinds: dict[str, Callable[[str], Any]] = {
            "r": int,
            "alpha": float,
            "dropout": float,
            "targets": lambda value: tuple(value.split("+")),
        }
        values: dict[str, Any] = {}
        names = [f.name for f in dataclasses.fields(cls)]
        for part in text.split(","):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign or not value or name in values:
                raise InputError("lora", text, f"of the form {FORM}")
            if name not in names:
                raise InputError("lora", part, f"of the form {FORM} ({nearest(name, names)})")
            try:
                values[name] = kinds.get(name, str)(value)
            except ValueError:
                raise InputError("lora", part, f"a number, as in {FORM}") from None
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"lora {error.field}", error.value, error.right) from None


class Adapter:
    """What an adapted layer has besides its own class (see `_adapted`)."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_p: float  # dropout
    lora_kind: Kind
    training: bool
    bias: Tensor | None
    _parameters: dict[str, Any]

    def base(self) -> Tensor:
        """Return W₀."""
        weight: Tensor = self._parameters[_entry(self.lora_kind)]
        return weight

    def merged(self) -> Tensor:
        """Return W₀ + s·B·A, as the layer keeps it."""
        return plus_product(self.base(), self.lora_A, self.lora_B, self.lora_scale, self.lora_kind)

    def beside(self, x: Tensor) -> Tensor:
        """Return s·B·(A·x)."""
        x = F.dropout(x, self.lora_p, self.training) if self.lora_p else x
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.lora_scale


def plus_product(weight: Tensor, a: Tensor, b: Tensor, scale: float, kind: Kind) -> Tensor:
    """Return W₀ + s·B·A."""
    product = (b @ a) * scale
    return weight + (product.mT if kind == "transposed" else product)


def _linear(self: Any, x: Tensor) -> Tensor:
    out: Tensor = F.linear(x, self.base(), self.bias) + self.beside(x)
    return out


def _transposed(self: Any, x: Tensor) -> Tensor:
    flat: Tensor = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.base())
    out: Tensor = flat.reshape(*x.shape[:-1], -1) + self.beside(x)
    return out


@functools.cache
def _adapted(kind: type[nn.Module], as_: Kind, plain: bool) -> type[nn.Module]:
    """Return the class of an adapted layer; a layer whose forward pass is its own (not `plain`) reads the merged weight."""
    members: dict[str, Any] = {"__module__": __name__, _entry(as_): property(Adapter.merged)}
    if plain:
        members["forward"] = _linear if as_ == "linear" else _transposed
    return type(f"LoRA{kind.__name__}", (Adapter, kind), members)


def _entry(kind: Kind) -> str:
    return "in_proj_weight" if kind == "attention" else "weight"


def kind_of(layer: nn.Module) -> Kind | None:
    """Return how a layer can be adapted: nn.Linear, Conv1D as in GPT-2 (a linear layer kept transposed), attention; else None."""
    if isinstance(layer, nn.Linear):
        return "linear"
    if isinstance(layer, nn.MultiheadAttention):
        return "attention"
    return "transposed" if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") else None


def adapt(module: nn.Module, lora: Lora, head: Sequence[str], seed: int = 0) -> nn.Module:
    """Return a copy of a model with adapters, in which nothing else trains but the head's modules (`lora.head`)."""
    adapted = copy.deepcopy(module)
    layers = dict(chosen(adapted, lora, head))
    kept = head if lora.head == "train" else ()
    for name, parameter in adapted.named_parameters():
        if not _within(name, kept):
            parameter.requires_grad_(False)
    for place, (name, layer) in enumerate(layers.items()):
        if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is None:
            raise InputError("lora", name, "an attention whose queries, keys and values have the same size")
        generator = torch.Generator().manual_seed(plan.key(seed, plan.ADAPTER, place) >> 1)
        _attach(layer, lora, generator)
    return adapted


def _attach(layer: nn.Module, lora: Lora, generator: torch.Generator) -> None:
    """Give a layer A and B; it becomes an instance of its adapted class."""
    kind = kind_of(layer)
    assert kind is not None
    weight: Tensor = getattr(layer, _entry(kind))
    into, out = (weight.shape[0], weight.shape[1]) if kind == "transposed" else (weight.shape[1], weight.shape[0])
    a = nn.init.kaiming_uniform_(torch.empty(lora.r, into), a=math.sqrt(5), generator=generator)
    plain = kind == "transposed" or type(layer).forward is nn.Linear.forward
    layer.__class__ = _adapted(type(layer), kind, plain)  # type: ignore[arg-type]
    layer.register_parameter(A, nn.Parameter(a.to(weight)))
    layer.register_parameter(B, nn.Parameter(weight.new_zeros(out, lora.r)))
    for name, value in (("scale", lora.scale), ("p", lora.dropout), ("kind", kind)):
        setattr(layer, f"lora_{name}", value)


def chosen(module: nn.Module, lora: Lora, head: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that are adapted, by name, in the model's order; an attention brings its output projection."""
    if any(True for _ in adapters(module)):
        raise InputError("lora", Shown(type(module).__name__), "a model without adapters: this one has some")
    known = {name: layer for name, layer in module.named_modules() if name and kind_of(layer)}
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        raise InputError("lora", Shown(type(module).__name__), "a model that consists of modules")
    inner = {f"{name}.out_proj" for name, layer in known.items() if isinstance(layer, nn.MultiheadAttention)}
    free = [name for name in known if name not in inner and not _within(name, head)]
    names: set[str] = set()
    for target in lora.targets:
        if target == ALL_LINEAR:
            found = free
        else:
            found = [name for name in known if name not in inner and _matches(name, target)]
        if not found:
            raise InputError("lora", target, f"a linear layer or attention of the model: {nearest(target, free)}")
        for name in found:
            if _within(name, head) and lora.head == "train":
                raise InputError(
                    "lora", target, f"outside of the head ({name}), which trains as a whole (or head=freeze)"
                )
        names.update(found)
    names |= {name for name in inner if name.removesuffix(".out_proj") in names}
    yield from ((name, layer) for name, layer in known.items() if name in names)


def _matches(name: str, target: str) -> bool:
    """Return whether a target is a module's name, the end of it, or a pattern for the whole of it."""
    return name == target or name.endswith(f".{target}") or fnmatch.fnmatchcase(name, target)


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


# ---- adapted models ------------------------------------------------------------------------------------------------------
def adapters(module: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield the adapted layers of a model, by name."""
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, Adapter):
            yield name, layer


def require(module: nn.Module, method: str) -> None:
    """Refuse a model without adapters, for a method that is about them."""
    if next(adapters(module), None) is None:
        raise InputError("lora", "", f"set for {method}, for example r=8,alpha=16,targets={ALL_LINEAR}")


def matrices(module: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of all A and of all B in a model's state."""
    names = [name for name, _ in adapters(module)]
    return frozenset(f"{name}.{A}" for name in names), frozenset(f"{name}.{B}" for name in names)


def with_lora(module: nn.Module, spec: str, head: str | Sequence[str], seed: int = 0) -> nn.Module:
    """Return a copy of a model with adapters, as a run with `lora=spec` and this seed has it: for its state dicts."""
    return adapt(module, Lora.parse(spec), [head] if isinstance(head, str) else head, seed)


def removed(module: nn.Module) -> nn.Module:
    """Return a copy of a model without its adapters."""
    plain = copy.deepcopy(module)
    for _, layer in list(adapters(plain)):
        assert isinstance(layer, nn.Module)
        del layer._parameters[A], layer._parameters[B], layer.lora_scale, layer.lora_p, layer.lora_kind
        layer.__class__ = type(layer).__mro__[2]
    return plain


def merged(module: nn.Module, state: Params) -> Params:
    """Return a state dict of an adapted model as one of the model that it was made of: W in the place of W₀, A and B."""
    plain = {name: value for name, value in state.items() if name.rpartition(".")[2] not in (A, B)}
    for name, layer in adapters(module):
        entry = f"{name}.{_entry(layer.lora_kind)}"
        a, b = state[f"{name}.{A}"], state[f"{name}.{B}"]
        plain[entry] = plus_product(state[entry], a, b, layer.lora_scale, layer.lora_kind)
    return plain
