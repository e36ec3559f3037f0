"""Which algorithm computes a stacked convolution: measured once for each shape on a GPU, the default elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...core.reading import Unreadable, read_json
from . import warm
from .convolution import GROUPED, PRODUCT, ROWS, TRITON, TURNED, Shape, apply, kernel_of, turns

Times: TypeAlias = dict[str, float]  # milliseconds by algorithm
Timer: TypeAlias = Callable[[str, Shape, torch.dtype, int, torch.device, bool], Times]

FORMAT = 3  # of the file of measurements: another number where there are other candidates

TILES = {  # what was fastest for some layer of a CNN or a ResNet-18 on an H200, in bfloat16 or TF32
    "forward": (
        (128, 64, 32, 4, 3, 1), (64, 64, 64, 4, 3, 1), (64, 128, 64, 4, 3, 1), (128, 128, 64, 8, 3, 1), (256, 32, 16, 8, 3, 1),
    ),
    "input_grad": ((128, 32, 64, 4, 3, 1), (128, 64, 64, 4, 3, 1), (64, 64, 64, 4, 3, 1), (128, 128, 64, 8, 3, 1)),
    "weight_grad": (
        (64, 64, 64, 4, 3, 1), (128, 128, 64, 8, 3, 1), (32, 128, 64, 4, 3, 1), (32, 32, 64, 4, 3, 8), (32, 16, 64, 4, 3, 8),
    ),
}  # fmt: skip
TF32_TILES = {  # the same for numbers of four bytes
    "forward": (
        (128, 64, 32, 4, 3, 1), (128, 128, 32, 8, 3, 1), (128, 128, 64, 8, 3, 1), (64, 64, 64, 4, 3, 1), (64, 128, 64, 4, 3, 1),
    ),
    "input_grad": ((128, 64, 64, 4, 3, 1), (64, 64, 64, 4, 3, 1)),
    "weight_grad": ((64, 64, 64, 4, 3, 1), (32, 128, 64, 4, 3, 1), (32, 32, 64, 4, 3, 8)),
}  # fmt: skip
ROW_TILES = ((128, 128, 32, 8, 3, 1), (128, 64, 32, 4, 4, 1), (128, 64, 64, 8, 3, 1), (64, 64, 64, 4, 3, 8))
NARROW = {  # besides, for few channels
    "forward": ((128, 32, 128, 4, 2, 1), (128, 64, 128, 8, 2, 1)), "weight_grad": ((32, 128, 32, 4, 3, 8),),
}  # fmt: skip


def has_triton() -> bool:
    """Return whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def candidates(operation: str, s: Shape, dtype: torch.dtype, triton: bool | None = None) -> list[str]:
    """Return what may be fastest on a GPU; a tile is written as "triton BM BN BK warps stages parts", of other kernels likewise.

    `triton` says whether there is Triton (None: look).
    """
    names = [PRODUCT, GROUPED]
    if dtype == torch.float64 or not (has_triton() if triton is None else triton):
        return names
    pixels, entries = s.batch * s.out[0] * s.out[1], s.kernel[0] * s.kernel[1] * s.channels
    rows, columns, depth = {
        "forward": (pixels, s.outputs, s.channels if s.channels >= 16 else entries),
        "input_grad": (s.batch * s.image[0] * s.image[1], s.channels, s.outputs),
        "weight_grad": (s.outputs, entries, pixels),
    }[operation]
    tiles = TF32_TILES if dtype == torch.float32 else TILES
    tried = [(TRITON, tile) for tile in tiles[operation] + (NARROW.get(operation, ()) if s.channels < 16 else ())]
    if operation == "input_grad" and turns(s) and s.outputs >= 16:
        tried += [(TURNED, tile) for tile in tiles["forward"][:3]]
    if operation == "weight_grad" and dtype == torch.float32:
        tried += [(ROWS, tile) for tile in ROW_TILES]
    for kind, (bm, bn, bk, warps, stages, parts) in tried:
        bm, bn, bk = min(bm, _power(rows)), min(bn, _power(columns)), min(bk, _power(depth))
        name = f"{kind} {bm} {bn} {bk} {warps} {stages} {parts}"
        if name not in names:
            names.append(name)
    return names


def _power(value: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (value - 1).bit_length())


def default(operation: str, s: Shape, dtype: torch.dtype, cuda: bool, triton: bool | None = None) -> str:
    """Return the algorithm for a shape that was not measured: tiles on a GPU, groups elsewhere; both without patches."""
    return [*candidates(operation, s, dtype, triton), GROUPED][2] if cuda else GROUPED


def timings(operation: str, s: Shape, dtype: torch.dtype, n: int, device: torch.device, exact: bool) -> Times:
    """Measure each candidate that works, on random tensors; milliseconds, the median of five after a warm-up."""
    shapes = {"x": (n, s.batch, *s.image, s.channels), "w": (n, s.outputs, *s.kernel, s.channels)}
    shapes["g"] = (n, s.batch, *s.out, s.outputs)
    first, second = {"forward": ("x", "w"), "input_grad": ("g", "w"), "weight_grad": ("x", "g")}[operation]
    a, b = (torch.randn(shapes[name], device=device, dtype=dtype) for name in (first, second))
    times: Times = {}
    for algorithm in candidates(operation, s, dtype):
        try:
            apply(algorithm, operation, a, b, s, exact)
            torch.cuda.synchronize(device)
            laps = []
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                apply(algorithm, operation, a, b, s, exact)
                end.record()
                end.synchronize()
                laps.append(begin.elapsed_time(end))
            times[algorithm] = sorted(laps)[2]
        except Exception:  # out of memory or of shared memory, a tile that the compiler refuses: not a candidate
            torch.cuda.empty_cache()
    if not times:
        raise RuntimeError(f"no algorithm computes the convolution {operation} {s} on {device}")
    return times


class Choices:
    """What was measured and chosen on the way: algorithms by operation and shape, clients at a time, threads, seconds spent.

    `algorithms` is what a run folder keeps and a resumed run is given: {"forward float32 …": "triton 128 64 32 4 3"}.
    """

    def __init__(
        self, algorithms: dict[str, str] | None = None, timer: Timer = timings, cache: Path | None = None
    ) -> None:
        """`timer` measures a shape; `cache` is the file that keeps measurements between runs (None: one for each GPU)."""
        self.algorithms: dict[str, str] = dict(algorithms or {})
        self.asked: dict[str, tuple[str, Shape, torch.dtype]] = {}
        self.times: dict[str, Times] = {}  # of what was measured here
        self.seconds = 0.0  # spent on tracing, measuring, compiling and capturing
        self.cohort = 0  # how many clients fitted into memory at once; 0: no limit was met
        self.threads = 0  # that clients were trained on, where results depend on it; 0: one
        self.timer, self.cache = timer, cache

    def algorithm(self, operation: str, s: Shape, dtype: torch.dtype, cuda: bool) -> str:
        """Return the algorithm to use, and remember that it was asked for."""
        key = f"{operation} {s.text(dtype)}"
        self.asked.setdefault(key, (operation, s, dtype))
        return self.algorithms.get(key) or default(operation, s, dtype, cuda)

    def to_dict(self) -> dict[str, Any]:
        """Return all that was chosen, for a run folder; empty where nothing was."""
        chosen: dict[str, Any] = {"convolutions": self.algorithms} if self.algorithms else {}
        return chosen | {name: getattr(self, name) for name in ("cohort", "threads") if getattr(self, name)}

    def update(self, chosen: dict[str, Any]) -> None:
        """Take over what an earlier part of the run chose."""
        self.algorithms.update(chosen.get("convolutions", {}))
        self.cohort = int(chosen.get("cohort", self.cohort))
        self.threads = int(chosen.get("threads", self.threads))

    def expect(self, device: torch.device) -> None:
        """Prepare to measure shapes on a GPU on which nothing was measured yet."""
        if device.type == "cuda" and has_triton() and not (self.cache or _cache_file(device)).exists():
            warm.begin()

    def missing(self) -> list[str]:
        """Return the shapes that were asked for and not yet measured."""
        return [key for key in self.asked if key not in self.algorithms]

    def measure(self, device: torch.device, exact: bool, n: int) -> None:
        """Choose what is missing, for a stack of n clients: as an earlier run on such a GPU did, else by measuring."""
        if not self.missing():
            return
        file = self.cache or _cache_file(device)
        known = _read(file)
        sized = {key: f"{key} {_power(n)} {'exact' if exact else 'tf32'}" for key in self.missing()}
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            asked = [self.asked[key] for key, name in sized.items() if name not in known]
            warm.compile_all(_jobs(asked, exact), 10 * major + minor)
        for key, name in sized.items():
            operation, s, dtype = self.asked[key]
            if name not in known:
                times = self.times[key] = self.timer(operation, s, dtype, n, device, exact)
                known[name] = min(times, key=lambda algorithm: times[algorithm])
            self.algorithms[key] = known[name]
        _write(file, known)


def _jobs(asked: Sequence[tuple[str, Shape, torch.dtype]], exact: bool) -> list[warm.Job]:
    """Return the kernels that measuring some shapes will need."""
    jobs = []
    for operation, s, dtype in asked:
        for algorithm in candidates(operation, s, dtype):
            if algorithm not in (GROUPED, PRODUCT):
                what, shape, tile = kernel_of(algorithm, operation, s)
                jobs.append(warm.Job(what, str(dtype).removeprefix("torch."), shape.numbers(), tuple(tile), exact))
    return jobs


@dataclass(frozen=True, eq=False)
class Lowering:
    """How stacked convolutions are computed: the choices, and whether products must be exact (no TF32)."""

    choices: Choices
    exact: bool


def _cache_file(device: torch.device) -> Path:
    """Return where measurements on this kind of GPU are kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "".join(c if c.isalnum() else "-" for c in f"{torch.cuda.get_device_name(device)} torch {torch.__version__}")
    return cache / "fedstill" / f"convolutions {FORMAT} {name}.json".replace(" ", "-")


def _read(file: Path) -> dict[str, str]:
    try:
        return {key: name for key, name in read_json(file).items() if isinstance(name, str)}
    except Unreadable:
        return {}


def _write(file: Path, known: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**_read(file), **known}, indent=1), encoding="utf-8")
        temporary.replace(file)
