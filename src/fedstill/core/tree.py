"""Arithmetic on trees of tensors: dictionaries whose leaves are tensors and whose branches are such dictionaries.

Parameters are the flat case (`name -> tensor`); what a server or a client keeps may nest them. Nothing here changes
its arguments, and floating leaves keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
Tree: TypeAlias = dict[str, Any]  # every value is a Tensor or again a Tree
SEPARATOR = "|"  # between the names of nested branches; never part of a parameter's name


def map(f: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply `f` leaf by leaf to trees of one shape."""
    first = trees[0]
    return {
        name: map(f, *(t[name] for t in trees)) if isinstance(value, dict) else f(*(t[name] for t in trees))
        for name, value in first.items()
    }


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every leaf with its full name, in the order of the tree."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}{SEPARATOR}")
        else:
            yield prefix + name, value


def flatten(tree: Tree) -> Params:
    """The tree as one flat dictionary; with its `outline`, `fill` gives the tree back."""
    return dict(leaves(tree))


def outline(tree: Tree) -> dict[str, Any]:
    """The tree's branches and names in order, leaves as None: what a flat file does not keep. JSON can hold it."""
    return {name: outline(part) if isinstance(part, dict) else None for name, part in tree.items()}


def fill(outline: dict[str, Any], flat: Params, prefix: str = "") -> Tree:
    """The tree with this outline, its leaves taken from what `flatten` gave."""
    return {
        name: flat[prefix + name] if part is None else fill(part, flat, f"{prefix}{name}{SEPARATOR}")
        for name, part in outline.items()
    }


def clone(tree: Tree) -> Tree:
    """A copy that shares no memory."""
    return map(lambda t: t.detach().clone(), tree)


def zeros(tree: Tree) -> Tree:
    """Zeros in the tree's shape."""
    return map(torch.zeros_like, tree)


def scalar_zero(tree: Tree) -> Tensor:
    """A single 0 in the dtype and on the device of the tree's first leaf."""
    return torch.zeros_like(next(leaves(tree))[1].sum())


def add(a: Tree, b: Tree, scale: float = 1.0) -> Tree:
    """a + scale·b."""
    return map(lambda x, y: _like(x, x + scale * y), a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a − b."""
    return map(lambda x, y: x - y, a, b)


def mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """Σ pᵢ·treeᵢ with pᵢ = weightᵢ / Σ weights, added in the order given, so the same trees give the same bits.

    Whole-number leaves (BatchNorm's count of batches) are averaged in float64 and rounded.
    """
    total = float(sum(weights))
    if not trees or total <= 0:
        raise ValueError(f"a mean needs at least one tree and a positive weight, got {len(trees)} and {total}")
    flat = [flatten(t) for t in trees]
    result: Params = {}
    floating = [name for name, leaf in flat[0].items() if leaf.is_floating_point()]
    together = _together([[entry[name] for name in floating] for entry in flat])
    if together is not None:
        whole, columns = together
        total_row = whole[0] * (weights[0] / total)
        for row, weight in zip(whole[1:], weights[1:], strict=True):
            total_row.add_(row, alpha=weight / total)
        for name, column in zip(floating, columns, strict=True):
            leaf = flat[0][name]
            result[name] = total_row[column : column + leaf.numel()].reshape(leaf.shape)
    elif floating:
        sums = torch._foreach_mul([flat[0][name] for name in floating], weights[0] / total)
        for tree, weight in zip(flat[1:], weights[1:], strict=True):
            torch._foreach_add_(sums, [tree[name] for name in floating], alpha=weight / total)
        result = dict(zip(floating, sums, strict=True))
    for name, leaf in flat[0].items():
        if not leaf.is_floating_point():
            exact = sum(t[name].double() * (w / total) for t, w in zip(flat, weights, strict=True))
            result[name] = torch.as_tensor(exact).round().to(leaf.dtype)
    return fill(outline(trees[0]), result)


def _together(entries: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[int]] | None:
    """Where `rows` made the entries: a view of all of each, and where in it each leaf begins. The sums are the same."""
    base = entries[0][0]._base if entries[0] else None
    if base is None or base.ndim != 2 or not base.is_contiguous():
        return None
    width = base.shape[1]
    columns = [int(leaf.storage_offset()) % width for leaf in entries[0]]
    first, last = min(columns), max(c + leaf.numel() for c, leaf in zip(columns, entries[0], strict=True))
    if last > width or last - first != sum(leaf.numel() for leaf in entries[0]):
        return None
    size, start = base.element_size(), base.data_ptr()
    apart = [(column - columns[0]) * size for column in columns]
    found = []
    for entry in entries:
        row, at = entry[0].storage_offset() // width, entry[0].data_ptr()
        if entry[0]._base is not base or at != start + (row * width + columns[0]) * size:
            return None
        if any(leaf.data_ptr() != at + gap or not leaf.is_contiguous() for gap, leaf in zip(apart, entry, strict=True)):
            return None
        found.append(base[row, first:last])
    return found, [column - first for column in columns]


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """a where the (scalar) condition holds, else b: a branch that also works for a stack of clients."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def total(tree: Tree) -> Tensor:
    """Σ of all entries."""
    return torch.stack([leaf.sum() for _, leaf in leaves(tree)]).sum()


def square_norm(tree: Tree) -> Tensor:
    """Σ of all squares."""
    return total(map(torch.square, tree))


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of one shape as one tree with a leading axis."""
    return map(lambda *leaf: torch.stack(leaf), *trees)


def stack_shared(trees: Sequence[Tree]) -> Tree:
    """As `stack`, without a copy of leaves that are one and the same tensor in all trees. Not to be written to."""

    def join(*leaf: Tensor) -> Tensor:
        same = all(other is leaf[0] for other in leaf)
        return leaf[0].expand(len(leaf), *leaf[0].shape) if same else torch.stack(leaf)

    return map(join, *trees)


def unstack(tree: Tree, index: int) -> Tree:
    """One entry of a stacked tree, as its own memory (a view would keep the whole stack alive)."""
    return map(lambda t: t[index].clone(), tree)


def rows(tree: Tree, n: int) -> list[Tree]:
    """The n entries of a stacked tree, as views of new memory: what keeps one of them for long should copy it.

    Leaves of one dtype lie together, entry by entry, so that `mean` can add whole entries.
    """
    flat = flatten(tree)
    found: list[Params] = [{} for _ in range(n)]
    for dtype in {leaf.dtype for leaf in flat.values()}:
        part = {name: leaf.reshape(n, -1) for name, leaf in flat.items() if leaf.dtype == dtype}
        whole = torch.cat(list(part.values()), 1)
        first = 0
        for name, leaf in part.items():
            columns = whole[:, first : first + leaf.shape[1]].reshape(n, *flat[name].shape[1:])
            for entry, view in zip(found, columns.unbind(0), strict=True):
                entry[name] = view
            first += leaf.shape[1]
    shape = outline(tree)
    return [fill(shape, entry) for entry in found]


def finite_rows(n: int, *trees: Tree) -> Tensor:
    """For each of the n entries of stacked trees whether it holds only finite numbers; nothing waits for the device."""
    sums = [
        leaf.reshape(n, -1).sum(1, dtype=torch.float64)
        for tree in trees
        for _, leaf in leaves(tree)
        if leaf.is_floating_point()
    ]
    return torch.isfinite(torch.stack(sums)).all(0) if sums else torch.ones(n, dtype=torch.bool)


def finite_each(trees: Sequence[Tree]) -> list[bool]:
    """Return for each tree whether it holds only finite numbers; the device is waited for once.

    Entries that `rows` made are summed as rows of their buffer, in one operation for all trees.
    """
    flat = [[leaf for _, leaf in leaves(tree) if leaf.is_floating_point()] for tree in trees]
    same = all(len(entry) == len(flat[0]) for entry in flat)
    together = _together(flat) if flat and flat[0] and same else None
    if together is not None:
        return [bool(ok) for ok in torch.isfinite(torch.stack(together[0]).sum(1, dtype=torch.float64)).tolist()]
    finite = [True] * len(trees)
    owners = [i for i, entry in enumerate(flat) for _ in entry]
    if owners:
        sums = torch.stack([leaf.sum(dtype=torch.float64) for entry in flat for leaf in entry])
        for i, ok in zip(owners, torch.isfinite(sums).tolist(), strict=True):
            finite[i] = finite[i] and ok
    return finite


def fit_rows(tree: Tree, names: frozenset[str], rows: int) -> Tree:
    """The tree with the named entries cut to `rows` rows, or filled up with zeros."""

    def fit(leaf: Tensor) -> Tensor:
        if len(leaf) >= rows:
            return leaf[:rows]
        return torch.cat([leaf, leaf.new_zeros((rows - len(leaf), *leaf.shape[1:]))])

    return {
        name: (map(fit, part) if isinstance(part, dict) else fit(part)) if name in names else part
        for name, part in tree.items()
    }


def to(tree: Tree, device: torch.device | str, dtype: torch.dtype | None = None) -> Tree:
    """The tree on a device; floating leaves in `dtype` where one is given."""
    return map(lambda t: t.to(device, dtype if dtype and t.is_floating_point() else t.dtype), tree)


def put(
    values: Sequence[float] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """The values as a tensor on the device.

    A copy from ordinary memory makes the host wait until the device has done everything it was given before; from pinned memory
    it does not, and the host goes on.
    """
    found = values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def unalias(tree: Tree, *others: Tree) -> Tree:
    """The tree, with every leaf copied that shares memory with a leaf of the others or with an earlier one of its own."""
    taken = _Taken(leaf for other in others for _, leaf in leaves(other))

    def own(leaf: Tensor) -> Tensor:
        leaf = leaf.detach()
        if leaf in taken:
            leaf = leaf.clone()
        taken.add(leaf)
        return leaf

    return map(own, tree)


def aliases(a: Tree, b: Tree) -> list[str]:
    """Names of a's leaves that share memory with any leaf of b."""
    taken = _Taken(leaf for _, leaf in leaves(b))
    return [name for name, leaf in leaves(a) if leaf in taken]


class _Taken:
    """Stretches of memory that tensors lie in. Two views of one storage share memory only where their stretches meet."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int]]] = {}
        for leaf in tensors:
            self.add(leaf)

    def add(self, leaf: Tensor) -> None:
        if leaf.numel():
            self._by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(_stretch(leaf))

    def __contains__(self, leaf: Tensor) -> bool:
        if not leaf.numel():
            return False
        first, last = _stretch(leaf)
        there = self._by_storage.get(leaf.untyped_storage().data_ptr(), [])
        return any(a <= last and first <= b for a, b in there)


def _stretch(leaf: Tensor) -> tuple[int, int]:
    """The first and the last byte of a tensor."""
    reach = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    first = int(leaf.storage_offset()) * leaf.element_size()
    return first, first + (reach + 1) * leaf.element_size() - 1


def finite(tree: Tree) -> bool:
    """Whether no leaf holds a number that is not finite."""
    sums = [leaf.sum(dtype=torch.float64) for _, leaf in leaves(tree) if leaf.is_floating_point()]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())


def _like(reference: Tensor, value: Tensor) -> Tensor:
    return value if reference.is_floating_point() else value.round().to(reference.dtype)
