"""Convolution where every client of a stack has its own weights.

What `vmap` makes of it is a grouped convolution, which cuDNN does badly. Here it is one of three, with the same result to
rounding: `grouped`; `product`, patches and a batched matrix product; `triton`, the product without patches in memory. On a GPU
the fastest is found by measuring, once per shape (`Choices`). The three operations (convolution, and its gradients by input and
by weight) are bilinear and closed under differentiation, so any order of derivative works.

Inside: channels last and clients first, x [n, B, H, W, C], w [n, O, KH, KW, C], y [n, B, OH, OW, O].
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Pair: TypeAlias = tuple[int, int]
GROUPED, PRODUCT = "grouped", "product"
OPERATIONS = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Shape:
    """One client's convolution: sizes of batch, image, channels and kernel, and how the kernel moves."""

    batch: int
    image: Pair
    channels: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def out(self) -> Pair:
        """Height and width of the result."""
        h, w = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(self.image, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )
        return h, w

    def numbers(self) -> dict[str, int]:
        """The sizes by the names that the kernels use."""
        names = ("H", "W", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
        pairs = (self.image, self.out, self.kernel, self.stride, self.padding, self.dilation)
        return {"B": self.batch, "C": self.channels, "O": self.outputs} | dict(
            zip(names, (v for pair in pairs for v in pair), strict=True)
        )

    def flops(self) -> int:
        """Operations of one of the three products for one client."""
        return (
            2 * self.batch * self.out[0] * self.out[1] * self.outputs * self.channels * self.kernel[0] * self.kernel[1]
        )

    def text(self, dtype: torch.dtype) -> str:
        """The shape in one line: the key of a choice."""
        pairs = (self.image, self.kernel, self.stride, self.padding, self.dilation)
        return " ".join(
            [str(dtype).removeprefix("torch."), str(self.batch), str(self.channels), str(self.outputs)]
            + ["x".join(map(str, pair)) for pair in pairs]
        )


# ---- three ways to do it ----------------------------------------------------------------------------------------------
def grouped(what: str, a: Tensor, b: Tensor, s: Shape) -> Tensor:
    """One convolution with n groups."""
    n = a.shape[0]

    def side(t: Tensor) -> Tensor:  # [n, B, H, W, C] → [B, n·C, H, W]
        return t.permute(1, 0, 4, 2, 3).reshape(t.shape[1], n * t.shape[4], t.shape[2], t.shape[3])

    def back(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], n, -1, *t.shape[2:]).permute(1, 0, 3, 4, 2)

    def kernel(t: Tensor) -> Tensor:  # [n, O, KH, KW, C] → [n·O, C, KH, KW]
        return t.permute(0, 1, 4, 2, 3).reshape(n * s.outputs, s.channels, *s.kernel)

    how = (s.stride, s.padding, s.dilation)
    if what == "forward":
        return back(F.conv2d(side(a), kernel(b), None, *how, n))
    if what == "input_grad":
        return back(_gradient(what, side(a), kernel(b), (s.batch, n * s.channels, *s.image), s, n))
    found = _gradient(what, side(a), side(b), (n * s.outputs, s.channels, *s.kernel), s, n)
    return found.reshape(n, s.outputs, s.channels, *s.kernel).permute(0, 1, 3, 4, 2)


def _gradient(what: str, a: Tensor, b: Tensor, shape: tuple[int, ...], s: Shape, groups: int) -> Tensor:
    """ATen's own gradient of a convolution, of this shape: by the input from (g, w), by the weight from (x, g)."""
    like = a.new_empty(1).expand(shape)  # only its shape is used
    by_input = what == "input_grad"
    given = (a, like, b) if by_input else (b, a, like)
    how = (None, s.stride, s.padding, s.dilation, False, (0, 0), groups, (by_input, not by_input, False))
    found: Tensor = torch.ops.aten.convolution_backward(*given, *how)[0 if by_input else 1]
    return found


def _taps(s: Shape) -> Iterator[tuple[slice, slice]]:
    """For each tap of the kernel: which rows and columns of the padded image it meets."""
    for i in range(s.kernel[0]):
        for j in range(s.kernel[1]):
            starts = (i * s.dilation[0], j * s.dilation[1])
            rows, columns = (
                slice(first, first + (size - 1) * step + 1, step)
                for first, size, step in zip(starts, s.out, s.stride, strict=True)
            )
            yield rows, columns


def product(what: str, a: Tensor, b: Tensor, s: Shape) -> Tensor:
    """Patches as shifted slices, and a batched matrix product."""
    n, (oh, ow), m = a.shape[0], s.out, s.batch * s.out[0] * s.out[1]
    (ph, pw), (h, w) = s.padding, s.image
    if what != "input_grad":
        padded = F.pad(a, (0, 0, pw, pw, ph, ph)) if ph or pw else a
        taps = [padded[:, :, rows, columns] for rows, columns in _taps(s)]
        patches = torch.stack(taps, 4).reshape(n, m, len(taps) * s.channels)
        if what == "forward":
            return torch.bmm(patches, b.reshape(n, s.outputs, -1).mT).reshape(n, s.batch, oh, ow, s.outputs)
        found = torch.bmm(b.reshape(n, m, s.outputs).mT, patches)
        return found.reshape(n, s.outputs, *s.kernel, s.channels)
    spread = torch.bmm(a.reshape(n, m, s.outputs), b.reshape(n, s.outputs, -1))
    spread = spread.reshape(n, s.batch, oh, ow, -1, s.channels)
    total = spread.new_zeros((n, s.batch, h + 2 * ph, w + 2 * pw, s.channels))
    for tap, (rows, columns) in enumerate(_taps(s)):
        total[:, :, rows, columns] += spread[..., tap, :]
    return total[:, :, ph : ph + h, pw : pw + w]


def _out_shape(what: str, n: int, s: Shape) -> tuple[int, ...]:
    return {
        "forward": (n, s.batch, *s.out, s.outputs),
        "input_grad": (n, s.batch, *s.image, s.channels),
        "weight_grad": (n, s.outputs, *s.kernel, s.channels),
    }[what]


@torch.library.custom_op("fedstill::convolution", mutates_args=())
def _triton(
    what: str, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], tile: list[int], exact: bool
) -> Tensor:
    from . import triton as kernels

    bias = None if bias is None else bias.contiguous()
    return kernels.launch(what, a.contiguous(), b.contiguous(), bias, _shape(sizes).numbers(), tuple(tile), exact)


@_triton.register_fake
def _(what: str, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], tile: list[int], exact: bool) -> Tensor:
    return a.new_empty(_out_shape(what, a.shape[0], _shape(sizes)))


def _shape(sizes: list[int]) -> Shape:
    pairs = [(sizes[i], sizes[i + 1]) for i in range(3, 13, 2)]
    return Shape(sizes[0], pairs[0], sizes[1], sizes[2], *pairs[1:])


def _sizes(s: Shape) -> list[int]:
    pairs = (s.image, s.kernel, s.stride, s.padding, s.dilation)
    return [s.batch, s.channels, s.outputs, *(v for pair in pairs for v in pair)]


# ---- choosing -----------------------------------------------------------------------------------------------------------
def candidates(what: str, s: Shape, dtype: torch.dtype) -> list[str]:
    """What may be fastest on a GPU; a tile is written as "triton BM BN BK warps stages parts"."""
    found = [PRODUCT, GROUPED]
    if dtype == torch.float64 or not has_triton():
        return found
    pixels, entries = s.batch * s.out[0] * s.out[1], s.kernel[0] * s.kernel[1] * s.channels
    rows, columns, depth = {
        "forward": (pixels, s.outputs, s.channels if s.channels >= 16 else entries),
        "input_grad": (s.batch * s.image[0] * s.image[1], s.channels, s.outputs),
        "weight_grad": (s.outputs, entries, pixels),
    }[what]
    for bm, bn, bk, warps, stages, parts in TILES[what] + (NARROW.get(what, ()) if s.channels < 16 else ()):
        bm, bn, bk = min(bm, _power(rows)), min(bn, _power(columns)), min(bk, _power(depth))
        text = f"triton {bm} {bn} {bk} {warps} {stages} {parts}"
        if text not in found:
            found.append(text)
    return found


TILES = {  # what was fastest for some layer of a CNN or a ResNet-18 on an H200, in bfloat16 or TF32
    "forward": (
        (128, 64, 32, 4, 3, 1), (64, 64, 64, 4, 3, 1), (64, 128, 64, 4, 3, 1), (128, 128, 64, 8, 3, 1), (256, 32, 16, 8, 3, 1),
    ),
    "input_grad": ((128, 32, 64, 4, 3, 1), (128, 64, 64, 4, 3, 1), (64, 64, 64, 4, 3, 1), (128, 128, 64, 8, 3, 1)),
    "weight_grad": (
        (64, 64, 64, 4, 3, 1), (128, 128, 64, 8, 3, 1), (32, 128, 64, 4, 3, 1), (32, 32, 64, 4, 3, 8), (32, 16, 64, 4, 3, 8),
    ),
}  # fmt: skip
NARROW = {"forward": ((128, 32, 128, 4, 2, 1),), "weight_grad": ((32, 128, 32, 4, 3, 8),)}  # besides, for few channels


def _power(value: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (value - 1).bit_length())


def has_triton() -> bool:
    """Whether Triton can be used."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def usual(what: str, s: Shape, dtype: torch.dtype, cuda: bool) -> str:
    """The way for a shape that was not measured: tiles on a GPU, groups elsewhere; both without patches in memory."""
    return [*candidates(what, s, dtype), GROUPED][2] if cuda else GROUPED


class Choices:
    """Which way is taken for which operation and shape: measured on a GPU, the default elsewhere.

    `kept` is what a run folder keeps and a resumed run is given: {"forward float32 …": "triton 128 64 32 4 3"}.
    """

    def __init__(self, kept: dict[str, str] | None = None) -> None:
        self.kept: dict[str, str] = dict(kept or {})
        self.seen: dict[str, tuple[str, Shape, torch.dtype]] = {}
        self.times: dict[str, dict[str, float]] = {}  # milliseconds, of what was measured here
        self.seconds = 0.0  # spent on tracing, measuring, compiling and capturing
        self.cohort = 0  # how many clients were found to fit into memory at once; 0: all so far

    def of(self, what: str, s: Shape, dtype: torch.dtype, cuda: bool) -> str:
        """The way to go; remembers that it was asked."""
        key = f"{what} {s.text(dtype)}"
        self.seen.setdefault(key, (what, s, dtype))
        return self.kept.get(key) or usual(what, s, dtype, cuda)

    def said(self) -> dict[str, Any]:
        """All that was chosen, for a run folder; empty where nothing was."""
        found: dict[str, Any] = {"convolutions": self.kept} if self.kept else {}
        return {**found, "cohort": self.cohort} if self.cohort else found

    def take(self, said: dict[str, Any]) -> None:
        """What an earlier part of the run chose."""
        self.kept.update(said.get("convolutions", {}))
        self.cohort = int(said.get("cohort", self.cohort))

    def missing(self) -> list[str]:
        """Shapes that were asked for and not yet measured."""
        return [key for key in self.seen if key not in self.kept]

    def measure(self, device: torch.device, exact: bool, n: int) -> None:
        """Find out what is missing, for a stack of n clients: as an earlier run on such a GPU found, else by measuring."""
        if not self.missing():
            return
        known = _remembered(device)
        for key in self.missing():
            what, s, dtype = self.seen[key]
            with_size = f"{key} {_power(n)} {'exact' if exact else 'tf32'}"
            if with_size not in known:
                self.times[key] = timings(what, s, dtype, n, device, exact)
                known[with_size] = min(self.times[key], key=lambda way: self.times[key][way])
            self.kept[key] = known[with_size]
        _remember(device, known)


def _memory_file(device: torch.device) -> Path:
    """Where measurements on this kind of GPU are kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "".join(c if c.isalnum() else "-" for c in f"{torch.cuda.get_device_name(device)} torch {torch.__version__}")
    return cache / "fedstill" / f"convolutions {name}.json".replace(" ", "-")


def _remembered(device: torch.device) -> dict[str, str]:
    try:
        found = json.loads(_memory_file(device).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(device: torch.device, known: dict[str, str]) -> None:
    file = _memory_file(device)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**_remembered(device), **known}, indent=1), encoding="utf-8")
        temporary.replace(file)


def timings(what: str, s: Shape, dtype: torch.dtype, n: int, device: torch.device, exact: bool) -> dict[str, float]:
    """Milliseconds of each candidate that works, on random tensors; the median of five after a warm-up."""
    shapes = {"x": (n, s.batch, *s.image, s.channels), "w": (n, s.outputs, *s.kernel, s.channels)}
    shapes["g"] = (n, s.batch, *s.out, s.outputs)
    first, second = {"forward": ("x", "w"), "input_grad": ("g", "w"), "weight_grad": ("x", "g")}[what]
    a, b = (torch.randn(shapes[name], device=device, dtype=dtype) for name in (first, second))
    found: dict[str, float] = {}
    for way in candidates(what, s, dtype):
        try:
            apply(way, what, a, b, s, exact)
            torch.cuda.synchronize(device)
            laps = []
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                apply(way, what, a, b, s, exact)
                end.record()
                end.synchronize()
                laps.append(begin.elapsed_time(end))
            found[way] = sorted(laps)[2]
        except Exception:  # out of memory or of shared memory, a tile that the compiler refuses: not a candidate
            torch.cuda.empty_cache()
    if not found:
        raise RuntimeError(f"no way to do the convolution {what} {s} on {device}")
    return found


def apply(way: str, what: str, a: Tensor, b: Tensor, s: Shape, exact: bool, bias: Tensor | None = None) -> Tensor:
    """One of the three operations in the given way; channels last, clients first. `bias` [n, O] is for the forward pass."""
    if way not in (GROUPED, PRODUCT):
        # A fourth channel of zeros for a pixel's three: four numbers of two bytes are one load.
        wide = what == "weight_grad" and s.channels == 3 and a.element_size() == 2
        given, shape = (F.pad(a, (0, 1)), dataclasses.replace(s, channels=4)) if wide else (a, s)
        out: Tensor = _triton(what, given, b, bias, _sizes(shape), [int(v) for v in way.split()[1:]], exact)
        return out[..., :3] if wide else out
    out = grouped(what, a, b, s) if way == GROUPED else product(what, a, b, s)
    return out if bias is None else out + bias[:, None, None, None].to(out.dtype)


# ---- as a client's model sees it ----------------------------------------------------------------------------------------
def conv2d(x: Tensor, w: Tensor, bias: Tensor | None, s: Shape, lowering: Lowering) -> Tensor:
    """One client's convolution, NCHW; under `vmap` the stack's."""
    return _conv(x, w, bias, "forward", s, lowering)


def _conv(a: Tensor, b: Tensor, bias: Tensor | None, what: str, s: Shape, lowering: Lowering) -> Tensor:
    out: Tensor = _Conv.apply(a, b, bias, what, s, lowering)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class Lowering:
    """How stacked convolutions are done: the choices, and whether products must be exact (no TF32)."""

    choices: Choices
    exact: bool


class _Conv(torch.autograd.Function):
    """The three bilinear operations, each differentiable by the other two."""

    generate_vmap_rule = False

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, what: str, s: Shape, lowering: Lowering) -> Tensor:
        how = (s.stride, s.padding, s.dilation)
        if what == "forward":
            return F.conv2d(a, b, None if bias is None else bias.to(a.dtype), *how)
        by_input = what == "input_grad"
        shape = (a.shape[0], s.channels, *s.image) if by_input else (s.outputs, s.channels, *s.kernel)
        return _gradient(what, a, b, shape, s, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, ctx.what, ctx.s, ctx.lowering = inputs
        ctx.save_for_backward(a, b)
        ctx.biased = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        a, b = ctx.saved_tensors
        s, lowering = ctx.s, ctx.lowering
        # (x, w) → y, (g, w) → dx, (x, g) → dw; each argument's gradient is one of the other two operations.
        by = {
            "forward": (("input_grad", grad, b), ("weight_grad", a, grad)),
            "input_grad": (("forward", grad, b), ("weight_grad", grad, a)),
            "weight_grad": (("input_grad", b, grad), ("forward", a, grad)),
        }[ctx.what]
        out = [
            _conv(left, right, None, what, s, lowering) if needed else None
            for needed, (what, left, right) in zip(ctx.needs_input_grad[:2], by, strict=True)
        ]
        bias = None if ctx.biased is None else grad.sum((0, 2, 3), dtype=ctx.biased)
        return out[0], out[1], bias, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        what: str,
        s: Shape,
        lowering: Lowering,
    ) -> Any:
        n = info.batch_size
        if in_dims[1] is None and in_dims[2] is None and what != "weight_grad":  # everybody's weights: a larger batch
            wide = a.movedim(in_dims[0], 0)
            flat = wide.reshape(n * wide.shape[1], *wide.shape[2:])
            found = _conv(flat, b, bias, what, dataclasses.replace(s, batch=flat.shape[0]), lowering)
            return found.reshape(n, wide.shape[1], *found.shape[1:]), 0
        a, b = (_rows_of(t, d, n) for t, d in zip((a, b), in_dims[:2], strict=True))
        bias = None if bias is None else _rows_of(bias, in_dims[2], n)
        nested = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (a, b))
        a, b = (t.permute(0, 1, 3, 4, 2).contiguous() for t in (a, b))
        way = GROUPED if nested else lowering.choices.of(what, s, a.dtype, a.is_cuda)
        found = apply(way, what, a, b, s, lowering.exact, bias)
        return found.permute(0, 1, 4, 2, 3), 0


def _rows_of(t: Tensor, axis: int | None, n: int) -> Tensor:
    """The client axis first; a tensor that everybody shares gets one."""
    return t.expand(n, *t.shape) if axis is None else t.movedim(axis, 0)


def max_pool(x: Tensor, kernel: Pair) -> Tensor:
    """Maximum over windows that lie side by side, NCHW; of equal values the first counts, as in torch's own."""
    out: Tensor = _Pool.apply(x, kernel)[0]  # type: ignore[no-untyped-call]
    return out


class _Pool(torch.autograd.Function):
    """Pooling whose gradient is one pass over the windows, which a compiler makes into one kernel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: Pair) -> tuple[Tensor, Tensor]:
        (kh, kw), (h, w) = kernel, (x.shape[2] // kernel[0], x.shape[3] // kernel[1])
        windows = x[:, :, : h * kh, : w * kw].reshape(*x.shape[:2], h, kh, w, kw)
        values, place = windows.transpose(3, 4).flatten(4).max(-1)
        return values, place.to(torch.uint8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.kernel = inputs
        ctx.image = (x.shape[2], x.shape[3])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        (kh, kw), (h, w) = ctx.kernel, ctx.image
        taps = torch.arange(kh * kw, device=grad.device)
        spread = torch.where(place.unsqueeze(-1) == taps, grad.unsqueeze(-1), torch.zeros_like(grad).unsqueeze(-1))
        whole = spread.reshape(*grad.shape, kh, kw).transpose(3, 4).flatten(4).flatten(2, 3)
        return F.pad(whole, (0, w - whole.shape[3], 0, h - whole.shape[2])), None
