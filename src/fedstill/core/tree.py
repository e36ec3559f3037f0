"""Arithmetic on trees of tensors: dictionaries whose leaves are tensors and whose branches are such dictionaries.

Parameters are the flat case (`name -> tensor`); the state of a server or a client may nest them. No function here changes its
arguments, and floating leaves keep their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
Tree: TypeAlias = dict[str, Any]  # every value is a Tensor or a Tree
SEPARATOR = "|"  # between the names of nested branches; never occurs in a parameter's name
SMALL = 1 << 24  # bytes that are copied rather than read by a call for each of many rows


def map(f: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply `f` leaf by leaf to trees of the same structure."""
    first = trees[0]
    return {
        name: map(f, *(t[name] for t in trees)) if isinstance(value, dict) else f(*(t[name] for t in trees))
        for name, value in first.items()
    }


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every leaf with its full name, in the order of the tree."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}{SEPARATOR}")
        else:
            yield prefix + name, value


def flatten(tree: Tree) -> Params:
    """Return the tree as one flat dictionary; `fill` restores the tree from it and its `outline`."""
    return dict(leaves(tree))


def outline(tree: Tree) -> dict[str, Any]:
    """Return the tree's branches and names in order, with None for leaves: the structure that `flatten` loses, as JSON."""
    return {name: outline(value) if isinstance(value, dict) else None for name, value in tree.items()}


def fill(outline: dict[str, Any], flat: Params, prefix: str = "") -> Tree:
    """Return the tree with this outline and the leaves of a flat dictionary: the inverse of `flatten`."""
    return {
        name: flat[prefix + name] if branch is None else fill(branch, flat, f"{prefix}{name}{SEPARATOR}")
        for name, branch in outline.items()
    }


def clone(tree: Tree) -> Tree:
    """Return a detached copy that shares no memory."""
    return map(lambda t: t.detach().clone(), tree)


def zeros(tree: Tree) -> Tree:
    """Return a tree of zeros of the same structure and shapes."""
    return map(torch.zeros_like, tree)


def scalar_zero(tree: Tree) -> Tensor:
    """Return a scalar 0 with the dtype and the device of the tree's first leaf."""
    return torch.zeros_like(next(leaves(tree))[1].sum())


def add(a: Tree, b: Tree, scale: float = 1.0) -> Tree:
    """Return a + scale·b."""
    return map(lambda x, y: _like(x, x + scale * y), a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a − b."""
    return map(lambda x, y: x - y, a, b)


def mean(trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
    """Return Σ pᵢ·treeᵢ with pᵢ = weightᵢ / Σ weights, summed in the order of the trees, so equal inputs give equal bits.

    Integer leaves (BatchNorm's count of batches) are averaged in float64 and rounded. A mean has no use for `around`: see
    `core.task.Average`.
    """
    total = float(sum(weights))
    if not trees or total <= 0:
        raise ValueError(f"a mean needs at least one tree and a positive weight, got {len(trees)} and {total}")
    flat = [flatten(t) for t in trees]
    result: Params = {}
    floating = [name for name, leaf in flat[0].items() if leaf.is_floating_point()]
    joined = _joined_rows([[entry[name] for name in floating] for entry in flat])
    if joined is not None:
        joined_rows, columns = joined
        total_row = joined_rows[0] * (weights[0] / total)
        for row, weight in zip(joined_rows[1:], weights[1:], strict=True):
            total_row.add_(row, alpha=weight / total)
        for name, column in zip(floating, columns, strict=True):
            leaf = flat[0][name]
            result[name] = total_row[column : column + leaf.numel()].reshape(leaf.shape)
    elif floating:
        sums = torch._foreach_mul([flat[0][name] for name in floating], weights[0] / total)
        for tree, weight in zip(flat[1:], weights[1:], strict=True):
            torch._foreach_add_(sums, [tree[name] for name in floating], alpha=weight / total)
        result = dict(zip(floating, sums, strict=True))
    whole = [name for name, leaf in flat[0].items() if not leaf.is_floating_point()]
    if whole:
        if any(entry[name].shape != flat[0][name].shape for entry in flat for name in whole):
            raise ValueError("a mean needs leaves of the same shape in every tree")
        table = _whole_numbers([[entry[name] for name in whole] for entry in flat])
        exact = table[0] * (weights[0] / total)
        for row, weight in zip(table[1:], weights[1:], strict=True):
            exact += row * (weight / total)
        parts = torch.split(exact.round(), [flat[0][name].numel() for name in whole])
        for name, part in zip(whole, parts, strict=True):
            result[name] = part.reshape(flat[0][name].shape).to(flat[0][name].dtype)
    return fill(outline(trees[0]), result)


def _joined_rows(entries: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[int]] | None:
    """Return (a view of each entry as one row, first column of each leaf) if `rows` made the entries, else None."""
    base = entries[0][0]._base if entries[0] else None
    if base is None or base.ndim != 2 or not base.is_contiguous() or not base.numel():
        return None
    width = base.shape[1]
    columns = [int(leaf.storage_offset()) % width for leaf in entries[0]]
    first, last = min(columns), max(c + leaf.numel() for c, leaf in zip(columns, entries[0], strict=True))
    if last > width or last - first != sum(leaf.numel() for leaf in entries[0]):
        return None
    size, start = base.element_size(), base.data_ptr()
    gaps = [(column - columns[0]) * size for column in columns]
    views = []
    for entry in entries:
        row, at = entry[0].storage_offset() // width, entry[0].data_ptr()
        if entry[0]._base is not base or at != start + (row * width + columns[0]) * size:
            return None
        if any(leaf.data_ptr() != at + gap or not leaf.is_contiguous() for gap, leaf in zip(gaps, entry, strict=True)):
            return None
        views.append(base[row, first:last])
    return views, [column - first for column in columns]


def _whole_numbers(entries: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the whole numbers of each entry as a row of float64: a call for each of a model's many counts would take long."""
    joined = _joined_rows(entries) if all(len(entry) == len(entries[0]) for entry in entries) else None
    if joined is not None and joined[1] == sorted(joined[1]):
        return torch.stack(joined[0]).double()
    return torch.stack([torch.cat([leaf.reshape(-1).double() for leaf in entry]) for entry in entries])


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Return a where the (scalar) condition holds, else b: a branch that also works for stacked clients.

    Where the host knows the condition (its attribute `known`), it is the tree itself, without copies.
    """
    known: bool | None = getattr(condition, "known", None)
    if known is not None:
        return map(lambda x, y: x if known else y, a, b)
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def total(tree: Tree) -> Tensor:
    """Return the sum of all elements."""
    return torch.stack([leaf.sum() for _, leaf in leaves(tree)]).sum()


def square_norm(tree: Tree) -> Tensor:
    """Return the sum of the squares of all elements."""
    return total(map(torch.square, tree))


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of the same structure along a new leading axis."""
    return map(lambda *leaf: torch.stack(leaf), *trees)


def stack_shared(trees: Sequence[Tree]) -> Tree:
    """Stack trees as `stack` does, but expand leaves that are the same tensor in all trees; do not write to the result."""

    def join(*leaf: Tensor) -> Tensor:
        same = all(other is leaf[0] for other in leaf)
        return leaf[0].expand(len(leaf), *leaf[0].shape) if same else torch.stack(leaf)

    return map(join, *trees)


def unstack(tree: Tree, index: int) -> Tree:
    """Return a copy of one entry of a stacked tree (a view would keep the whole stack alive)."""
    return map(lambda t: t[index].clone(), tree)


def without(tree: Tree, name: str) -> Tree:
    """Return the tree without one of its entries, if it has it."""
    return {other: value for other, value in tree.items() if other != name}


def rows(tree: Tree, n: int) -> list[Tree]:
    """Split a stacked tree into its n entries, views of one new buffer: copy an entry to store it for long.

    Leaves of one dtype are contiguous within an entry, so that `mean` can add an entry as one row.
    """
    flat = flatten(tree)
    entries: list[Params] = [{} for _ in range(n)]
    for dtype in {leaf.dtype for leaf in flat.values()}:
        flat_leaves = {name: leaf.reshape(n, -1) for name, leaf in flat.items() if leaf.dtype == dtype}
        buffer = torch.cat(list(flat_leaves.values()), 1)
        first = 0
        for name, leaf in flat_leaves.items():
            columns = buffer[:, first : first + leaf.shape[1]].reshape(n, *flat[name].shape[1:])
            for entry, view in zip(entries, columns.unbind(0), strict=True):
                entry[name] = view
            first += leaf.shape[1]
    structure = outline(tree)
    return [fill(structure, entry) for entry in entries]


def finite_rows(n: int, *trees: Tree) -> Tensor:
    """Return for each of the n entries of stacked trees whether all its numbers are finite, without waiting for the device."""
    sums = [
        leaf.reshape(n, -1).sum(1, dtype=torch.float64)
        for tree in trees
        for _, leaf in leaves(tree)
        if leaf.is_floating_point()
    ]
    return torch.isfinite(torch.stack(sums)).all(0) if sums else torch.ones(n, dtype=torch.bool)


def norms(trees: Sequence[Tree]) -> list[float]:
    """Return the norm of each tree's numbers, NaN or infinite where one is not finite; waits for the device once.

    It is infinite as well where float32 cannot hold the square of a float32 tree's norm, and where a whole number is above 2^53.
    Entries that `rows` made are read as rows of their buffer, in one operation for all trees.
    """
    flat: list[list[Tensor]] = [[] for _ in trees]
    whole: list[list[Tensor]] = [[] for _ in trees]
    for tree, floating, others in zip(trees, flat, whole, strict=True):
        for _, leaf in leaves(tree):
            (floating if leaf.dtype.is_floating_point else others).append(leaf)
    joined = _joined_rows(flat) if flat and flat[0] and all(len(entry) == len(flat[0]) for entry in flat) else None
    parts = flat if joined is None else [[row] for row in joined[0]]
    squares = [0.0] * len(trees)
    if joined is not None and len(trees) * joined[0][0].nbytes <= SMALL:  # a call for each row takes longer than a copy
        of_rows = torch.linalg.vector_norm(torch.stack(joined[0]), dim=1).tolist()
        parts, squares = [[] for _ in trees], [norm * norm for norm in of_rows]
    owners = [i for i, entry in enumerate(parts) for _ in entry]
    if owners:
        norms = torch._foreach_norm([leaf for entry in parts for leaf in entry])
        alike = len({norm.dtype for norm in norms}) == 1
        found = torch.stack(norms if alike else [norm.double() for norm in norms]).tolist()
        for i, norm in zip(owners, found, strict=True):
            squares[i] += norm * norm
    for shape in {tuple(leaf.shape for leaf in entry) for entry in whole if entry}:
        alike_ones = [i for i, entry in enumerate(whole) if tuple(leaf.shape for leaf in entry) == shape]
        table = _whole_numbers([whole[i] for i in alike_ones])
        if not table.numel():
            continue
        largest, square = table.abs().amax(1).tolist(), table.square().sum(1).tolist()
        for i, most, total in zip(alike_ones, largest, square, strict=True):
            squares[i] += total if most <= 2.0**53 else math.inf
    return [math.sqrt(square) for square in squares]


def fit_rows(tree: Tree, names: frozenset[str], rows: int) -> Tree:
    """Cut the named entries to `rows` rows or pad them with zeros; return the tree."""

    def fit(leaf: Tensor) -> Tensor:
        if len(leaf) >= rows:
            return leaf[:rows]
        return torch.cat([leaf, leaf.new_zeros((rows - len(leaf), *leaf.shape[1:]))])

    return {
        name: (map(fit, value) if isinstance(value, dict) else fit(value)) if name in names else value
        for name, value in tree.items()
    }


def to(tree: Tree, device: torch.device | str, dtype: torch.dtype | None = None) -> Tree:
    """Move the tree to a device; convert floating leaves to `dtype` if it is not None."""
    return map(lambda t: t.to(device, dtype if dtype and t.is_floating_point() else t.dtype), tree)


def put(
    values: Sequence[float] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy the values to a tensor on the device.

    A copy from pageable memory makes the host wait until the device has finished all earlier work; a copy from pinned memory does
    not.
    """
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def unalias(tree: Tree, *others: Tree) -> Tree:
    """Copy every leaf that shares memory with a leaf of the other trees or with an earlier leaf; return the tree."""
    occupied = _Occupied(leaf for other in others for _, leaf in leaves(other))

    def own(leaf: Tensor) -> Tensor:
        leaf = leaf.detach()
        if leaf in occupied:
            leaf = leaf.clone()
        occupied.add(leaf)
        return leaf

    return map(own, tree)


def aliases(a: Tree, b: Tree) -> list[str]:
    """Return the names of a's leaves that share memory with any leaf of b."""
    occupied = _Occupied(leaf for _, leaf in leaves(b))
    return [name for name, leaf in leaves(a) if leaf in occupied]


class _Occupied:
    """Ranges of memory that tensors occupy. Two views of one storage share memory only if their ranges overlap."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int]]] = {}
        for leaf in tensors:
            self.add(leaf)

    def add(self, leaf: Tensor) -> None:
        if leaf.numel():
            self._by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(_byte_range(leaf))

    def __contains__(self, leaf: Tensor) -> bool:
        if not leaf.numel():
            return False
        first, last = _byte_range(leaf)
        ranges = self._by_storage.get(leaf.untyped_storage().data_ptr(), [])
        return any(a <= last and first <= b for a, b in ranges)


def _byte_range(leaf: Tensor) -> tuple[int, int]:
    """Return the first and the last byte of a tensor in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    first = int(leaf.storage_offset()) * leaf.element_size()
    return first, first + (reach + 1) * leaf.element_size() - 1


def finite(tree: Tree) -> bool:
    """Return whether all numbers of the tree are finite."""
    sums = [leaf.sum(dtype=torch.float64) for _, leaf in leaves(tree) if leaf.is_floating_point()]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())


def _like(reference: Tensor, value: Tensor) -> Tensor:
    """Convert `value` to the dtype of an integer reference, rounded; leave it unchanged for a floating one."""
    return value if reference.is_floating_point() else value.round().to(reference.dtype)
