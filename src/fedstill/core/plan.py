"""Draws the clients of a round and their batches from (seed, round, client) alone.

Randomness is a counter-based hash (SplitMix64's finaliser on the host; a 32-bit avalanche on the device, for dropout), written
here instead of taken from a library's generator. So a draw depends only on its key: not on the order of calls, the engine, the
device, the number of workers, nor the version of numpy or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .secret import Secret
from .tree import put

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
COHORT, BATCHES, STEP, METHOD = 1, 2, 3, 4  # purposes of draws: separate streams
DEVICE, PRESENT, DROP, MONITOR = 5, 6, 7, 8  # purposes in simulated time
NOISE, SAMPLED = 9, 10  # purposes in differential privacy
ATTACK = 11  # who attacks, which samples are poisoned, and forged noise
ROOT = 12  # the samples that the server owns, and its training with them
ADAPTER = 17  # the first values of LoRA's A
DRAWS = 1 << 16  # a method's own draws from a step's key are numbered from here on, after every layer's dropout


def key(*words: int) -> int:
    """Hash several words to one 64-bit key; every word and its position matter."""
    h = _GAMMA
    for word in words:
        h = _mix((h + _GAMMA) ^ (word & _WORD))
    return h


def _mix(h: int) -> int:
    """Apply SplitMix64's finaliser."""
    h &= _WORD
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _WORD
    return h ^ (h >> 31)


def bits(k: int, n: int) -> NDArray[np.uint64]:
    """Return n random 64-bit words from key k."""
    h = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(k)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(h ^ (h >> np.uint64(31)), dtype=np.uint64)


def keys(*words: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `key` for arrays of words, which are broadcast against each other."""
    h: NDArray[np.uint64] = np.asarray([_GAMMA], dtype=np.uint64)
    for word in words:
        array = word if isinstance(word, np.ndarray) else np.asarray([word & _WORD], dtype=np.uint64)
        h = (h + np.uint64(_GAMMA)) ^ array
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h


def tensor_bits(k: Tensor, n: int) -> Tensor:
    """Return `bits` for a tensor of keys, on its device: the same words, as int64, along a new last axis."""
    h = torch.arange(1, n + 1, device=k.device) * _signed(_GAMMA) + k.unsqueeze(-1)
    h = (h ^ _shift(h, 30)) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ _shift(h, 27)) * _signed(0x94D049BB133111EB)
    return h ^ _shift(h, 31)


def normals(k: Tensor, n: int) -> Tensor:
    """Draw n standard normal numbers (float64) for each of a tensor of 64-bit keys, along a new last axis (Box and Muller)."""
    uniform = (_shift(tensor_bits(k, 2 * n), 11).double() + 0.5) / 2**53
    return (-2 * uniform[..., :n].log()).sqrt() * (2 * torch.pi * uniform[..., n:]).cos()


def row_keys(k: Tensor, index: Tensor) -> Tensor:
    """Return a key for each sample of a batch, from the step's key and the samples' places: no other sample changes it."""
    h = tensor_bits(k, 1) + index * _signed(_GAMMA)
    return _shift(tensor_bits(h, 1).squeeze(-1), 1)


@dataclass(frozen=True)
class Length:
    """How long a phase lasts: so many epochs, or (`steps` above 0) so many SGD steps, the same for every client.

    A phase in steps passes through a client's samples as many times as its steps need; the last epoch may be incomplete.
    """

    epochs: int = 0
    steps: int = 0

    def __bool__(self) -> bool:
        return self.epochs > 0 or self.steps > 0

    def of(self, samples: int, batch_size: int) -> int:
        """Return the number of SGD steps of a client with so many samples; partial batches count."""
        return self.steps or self.epochs * -(-samples // min(batch_size, samples))

    def epochs_of(self, samples: int, batch_size: int) -> float:
        """Return how many times a client with so many samples passes through them, counted in steps."""
        if not self.steps:
            return self.epochs
        return self.steps / -(-samples // min(batch_size, samples))


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _shift(h: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (h >> by) & ((1 << (64 - by)) - 1)


def _on(words: NDArray[np.uint64], device: torch.device) -> Tensor:
    """Copy 64-bit words to the device, as int64."""
    return put(words.view(np.int64), device)


@dataclass(frozen=True)
class Tables:
    """A phase's batches of several clients: a sample for each step, client and position in the batch.

    `index` is a position in the client's own data; it is 0 where `real` is false. `key` seeds a step's randomness. Clients with
    fewer steps than others have no real samples in the remaining steps.
    """

    index: Tensor  # [steps, clients, width]
    real: Tensor  # [steps, clients, width]
    key: Tensor  # [steps, clients]


def tables(
    seeds: Sequence[int],
    batch_size: int,
    round: int,
    clients: Sequence[int],
    samples: Sequence[int],
    length: int | Length,
    width: int,
    device: torch.device,
) -> Tables:
    """Return the batches that `Plan.order` and `Plan.step_keys` give client by client, drawn and sorted on the device.

    `length` is that of the phase; a plain number counts epochs.
    """
    length = _length(length)
    seed, client = (np.asarray(words, dtype=np.uint64) for words in (seeds, clients))
    steps = np.array([length.of(m, batch_size) for m in samples])
    epochs = -(-steps // np.array([Length(1).of(m, batch_size) for m in samples]))  # that a client begins
    first = np.cumsum(epochs) - epochs  # the row of a client's first epoch
    owner = np.repeat(np.arange(len(samples)), epochs)
    epoch = (np.arange(len(owner)) - first[owner]).astype(np.uint64)
    longest, n, mine = max(samples), put(samples, device), put(owner, device)
    drawn = tensor_bits(_on(keys(seed[owner], BATCHES, round, client[owner], epoch), device), longest) ^ -(1 << 63)
    padding = torch.arange(longest, device=device) >= n[mine].unsqueeze(1)  # what is drawn sorts as unsigned numbers
    order = drawn.masked_fill_(padding, (1 << 63) - 1).sort(dim=-1, stable=True).indices
    size = n.clamp(max=batch_size)
    per_epoch = (n + size - 1) // size
    step = torch.arange(int(steps.max()), device=device).unsqueeze(1)
    place = (step % per_epoch * size).unsqueeze(2) + torch.arange(width, device=device)
    real = (torch.arange(width, device=device) < size[:, None]) & (place < n[:, None])
    real &= (step < put(steps, device)).unsqueeze(2)
    row = put(first, device) + torch.minimum(step // per_epoch, put(epochs - 1, device))
    index = order[row.unsqueeze(2), place.clamp(max=longest - 1)]
    key = _shift(tensor_bits(_on(keys(seed, STEP, round, client), device), len(step)), 33).T
    return Tables(torch.where(real, index, 0), real, key)


def _length(length: int | Length) -> Length:
    """Return a length; a plain number counts epochs."""
    return length if isinstance(length, Length) else Length(length)


def private_tables(
    plan: Plan | JointPlan,
    round: int,
    phase: int,
    clients: Sequence[int],
    samples: Sequence[int],
    steps: Sequence[int],
    device: torch.device,
) -> Tables:
    """Return the batches that `private` gives client by client, padded to the longest, so that nobody is left out."""
    drawn = [plan.private(round, phase, *client) for client in zip(clients, samples, steps, strict=True)]
    width = max(len(rows) for batches, _ in drawn for rows in batches)
    index = np.full((max(steps), len(clients), max(1, width)), -1, dtype=np.int64)
    key = np.zeros(index.shape[:2], dtype=np.int64)
    for column, (batches, noise) in enumerate(drawn):
        key[: len(noise), column] = noise
        for step, rows in enumerate(batches):
            index[step, column, : len(rows)] = rows
    positions = put(index, device)
    return Tables(positions.clamp(min=0), positions >= 0, put(key, device))


def permutation(k: int, n: int) -> NDArray[np.int64]:
    """Return a random order of 0 … n−1 from key k."""
    return np.argsort(bits(k, n), kind="stable").astype(np.int64)


def uniform_bits(k: Tensor, layer: int, shape: Sequence[int]) -> Tensor:
    """Return 32 random bits (as int64) for every entry of `shape`, from a key and a layer's number; of several keys, by key.

    Entry i depends on (key, layer, i) only, row by row: padding a batch at its end changes no row before it.
    """
    count = int(np.prod(shape))
    k = _avalanche(k + layer * 0x9E3779B9).unsqueeze(-1)
    h = _avalanche(torch.arange(count, device=k.device) ^ k)
    return _avalanche(h + k).reshape((*k.shape[:-1], *shape))


def _avalanche(h: Tensor) -> Tensor:
    """Hash 32-bit integers with low bias (constants by C. Wellons' search), in 64-bit arithmetic."""
    h = h & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)


@dataclass(frozen=True)
class Plan:
    """The random choices of a run."""

    seed: int
    batch_size: int
    secret: Secret | None = None  # what says who is sampled, where clients must not know it

    def words(self, round: int, clients: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return a random word for each client, by which a round's clients are sampled."""
        if self.secret is None:
            return keys(self.seed, COHORT, round, clients)
        return np.array([self.secret.bits(1, "cohort", round, int(k))[0] for k in clients], dtype=np.uint64)

    def cohort(self, round: int, candidates: Sequence[int], count: int) -> list[int]:
        """Draw `count` of the candidates, uniformly without replacement; return them in ascending order."""
        ids = np.sort(np.asarray(candidates, dtype=np.uint64))
        ranks = self.words(round, ids)
        return sorted(int(k) for k in ids[np.argsort(ranks, kind="stable")[:count]])

    def order(self, round: int, client: int, samples: int, epoch: int) -> NDArray[np.int64]:
        """Return the order in which an epoch visits a client's samples, each once."""
        return permutation(key(self.seed, BATCHES, round, client, epoch), samples)

    def steps(self, samples: int, length: int | Length) -> int:
        """Return the number of SGD steps; partial batches count. A plain number counts epochs."""
        return _length(length).of(samples, self.batch_size)

    def batches(self, round: int, client: int, samples: int, epochs: int, width: int) -> NDArray[np.int64]:
        """Return all batches of a phase as rows of `width` indices; −1 is padding. Row s holds the samples of step s."""
        size = min(self.batch_size, samples)
        per_epoch = -(-samples // size)
        rows = np.full((epochs, per_epoch, width), -1, dtype=np.int64)
        for epoch in range(epochs):
            order = self.order(round, client, samples, epoch)
            for b in range(per_epoch):
                batch = order[b * size : (b + 1) * size]
                rows[epoch, b, : len(batch)] = batch
        return rows.reshape(epochs * per_epoch, width)

    def tables(
        self,
        round: int,
        clients: Sequence[int],
        samples: Sequence[int],
        length: int | Length,
        width: int,
        device: torch.device,
    ) -> Tables:
        """Return all batches of a phase for several clients, on the device."""
        return tables([self.seed] * len(clients), self.batch_size, round, clients, samples, length, width, device)

    def step_keys(self, round: int, client: int, steps: int) -> NDArray[np.int64]:
        """Return the keys of a phase's dropout masks, one for each step (31 bits, to fit any integer tensor)."""
        return (bits(key(self.seed, STEP, round, client), steps) >> np.uint64(33)).astype(np.int64)

    def private(
        self, round: int, phase: int, client: int, samples: int, steps: int
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return for each step of a phase of DP-SGD which samples take part, and the key of its noise (63 bits).

        Each sample takes part by itself, with the probability that gives `batch_size` on average.
        """
        size, step = min(self.batch_size, samples), np.arange(steps, dtype=np.uint64)
        drawn = keys(self.seed, SAMPLED, round, phase, client, step)
        rows = [np.flatnonzero((bits(int(k), samples) >> np.uint64(11)) * (samples / 2**53) < size) for k in drawn]
        return rows, (keys(self.seed, NOISE, round, phase, client, step) >> np.uint64(1)).astype(np.int64)


@dataclass(frozen=True)
class JointPlan:
    """The plans of several runs side by side, for engines: slot r·K + k is client k of run r. One run is the case r = 0."""

    plans: tuple[Plan, ...]
    clients: int  # K, of each run

    @property
    def batch_size(self) -> int:
        """Samples per step, equal in all runs."""
        return self.plans[0].batch_size

    def steps(self, samples: int, length: int | Length) -> int:
        """Return the number of SGD steps; partial batches count. A plain number counts epochs."""
        return self.plans[0].steps(samples, length)

    def order(self, round: int, slot: int, samples: int, epoch: int) -> NDArray[np.int64]:
        """Return the order in which an epoch visits a client's samples, each once."""
        run, client = divmod(slot, self.clients)
        return self.plans[run].order(round, client, samples, epoch)

    def step_keys(self, round: int, slot: int, steps: int) -> NDArray[np.int64]:
        """Return the keys of a phase's dropout masks, one for each step."""
        run, client = divmod(slot, self.clients)
        return self.plans[run].step_keys(round, client, steps)

    def private(
        self, round: int, phase: int, slot: int, samples: int, steps: int
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return for each step of a phase of DP-SGD which samples take part, and the key of its noise."""
        run, client = divmod(slot, self.clients)
        return self.plans[run].private(round, phase, client, samples, steps)

    def tables(
        self,
        round: int,
        slots: Sequence[int],
        samples: Sequence[int],
        length: int | Length,
        width: int,
        device: torch.device,
    ) -> Tables:
        """Return all batches of a phase of several clients, on the device."""
        seeds = [self.plans[slot // self.clients].seed for slot in slots]
        clients = [slot % self.clients for slot in slots]
        return tables(seeds, self.batch_size, round, clients, samples, length, width, device)


def ragged_tables(
    plan: Plan | JointPlan,
    round: int,
    clients: Sequence[int],
    samples: Sequence[int],
    steps: Sequence[int],
    width: int,
    device: torch.device,
) -> Tables:
    """Return the batches of clients with `steps` steps each, in descending order; each client takes the epochs that it needs."""
    shape = (steps[0], len(clients))
    index, key = np.full((*shape, width), -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, (client, n, count) in enumerate(zip(clients, samples, steps, strict=True)):
        size, per_epoch = min(plan.batch_size, n), plan.steps(n, 1)
        orders = np.full((-(-count // per_epoch), per_epoch * size), -1, dtype=np.int64)
        for epoch, order in enumerate(orders):
            order[:n] = plan.order(round, client, n, epoch)
        index[:count, row, :size] = orders.reshape(-1, size)[:count]
        key[:count, row] = plan.step_keys(round, client, count)
    positions = put(index, device)
    return Tables(positions.clamp(min=0), positions >= 0, put(key, device))
