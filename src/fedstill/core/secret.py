"""Random numbers that nobody can compute without a secret, where the plan's hash of a known seed would not do: noise of
differential privacy, and the sampling that its ε counts on.

Every number is SHAKE-256 of the secret and of words that say what it is for. The plan's SplitMix64 can be inverted: who knows
a few of its numbers knows the seed, and with it all others.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import tree
from .tree import Tree

SIZE = 32  # bytes


@dataclass(frozen=True)
class Secret:
    """A secret, or one that was derived from it for one purpose."""

    key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """Draw a secret."""
        return cls(secrets.token_bytes(SIZE))

    def stream(self, size: int, *words: str | int) -> bytes:
        """Return that many bytes for these words; words that differ in any place give others."""
        hashed = hashlib.shake_256(b"fedstill" + self.key)
        for word in words:
            text = f"{type(word).__name__}:{word}".encode()
            hashed.update(len(text).to_bytes(8, "little") + text)
        return hashed.digest(size)

    def child(self, *words: str | int) -> Secret:
        """Return the secret for one purpose; it does not tell this one."""
        return Secret(self.stream(SIZE, "child", *words))

    def digest(self) -> str:
        """Return what tells this secret from another, and nothing else of it."""
        return self.stream(SIZE, "digest").hex()

    def bits(self, count: int, *words: str | int) -> NDArray[np.uint64]:
        """Return random 64-bit words."""
        return np.frombuffer(self.stream(8 * count, "bits", *words), dtype="<u8").astype(np.uint64)

    def uniforms(self, count: int, *words: str | int) -> NDArray[np.float64]:
        """Return numbers between 0 and 1, neither of them among them."""
        drawn: NDArray[np.float64] = ((self.bits(count, *words) >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
        return drawn

    def normals(self, count: int, *words: str | int) -> Tensor:
        """Return standard normal numbers (float64; Box and Muller)."""
        uniform = torch.from_numpy(self.uniforms(2 * count, "normals", *words))
        return (-2 * uniform[:count].log()).sqrt() * (2 * torch.pi * uniform[count:]).cos()

    def private(
        self, phase: int, samples: int, steps: int, batch_size: int
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return what `Plan.private` returns: for each step of DP-SGD which samples take part, and a key, no two the same."""
        size, step = min(batch_size, samples), np.arange(steps, dtype=np.int64)
        rows = [np.flatnonzero(self.uniforms(samples, "batch", phase, s) * samples < size) for s in range(steps)]
        drawn = (self.bits(steps, "keys", phase) >> np.uint64(33)).astype(np.int64)
        return rows, (drawn << 32) | (phase << 24) | step


def digest_of(state: Tree) -> str:
    """Return the digest of a tree: names, types, shapes and values."""
    hashed = hashlib.sha256()
    for name, leaf in tree.leaves(state):
        value = leaf.detach().cpu().contiguous()
        head = f"{name} {value.dtype} {list(value.shape)}".encode()
        hashed.update(len(head).to_bytes(8, "little") + head)
        hashed.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
