"""User-level privacy by noise at the merge, and what uploads have spent of a privacy budget: ε at a given δ.

A step of DP-SGD, and a round of user-level privacy, is the Gaussian mechanism on a Poisson sample: each sample (or client)
takes part with probability `rate`, by itself; what it adds is clipped to a norm C, and noise of deviation σ·C is added to the
sum. Two data sets are neighbours if one has one sample (or client) more. ε is computed by the package `dp-accounting`, either
by Rényi divergences (RDP; Mironov, Talwar and Zhang, 2019) or by the distribution of the privacy loss (PLD; Koskela et al.,
2020), which is tighter and slower.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch

from ..core import plan, tree
from ..core.errors import InputError, Shown, TrainingError
from ..core.method import Method
from ..core.protection import Privacy
from ..core.secret import Secret
from ..core.task import Average, SampleNoise, Task
from ..core.tree import Tree
from ..engine.bench import Bench
from .gate import example_upload

AccountantName: TypeAlias = Literal["rdp", "pld"]
Spent: TypeAlias = Mapping[float, int]  # sampling rate → steps made at this rate


def accounting(kind: str = "on") -> Any:
    """Return the package that computes ε; refuse where it is not installed, since without ε no upload may leave."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        right = "'off' without the package dp-accounting, which computes ε (pip install 'fedstill[privacy]')"
        raise InputError("privacy", kind, right) from None
    return dp_accounting


def epsilon(spent: Spent, noise: float, delta: float, accountant: AccountantName = "rdp") -> float:
    """Return ε at δ of so many steps at each rate, with noise of `noise` times the clipping norm."""
    steps = tuple(sorted((rate, count) for rate, count in spent.items() if count))
    if any(not 0 < rate <= 1 or count < 0 for rate, count in steps):
        raise ValueError(f"spent = {dict(spent)}: should be rates above 0 and at most 1, with numbers of steps")
    if not steps:
        return 0.0
    if not noise > 0:
        return math.inf
    return (_by_rdp if accountant == "rdp" else _by_pld)(steps, noise, delta)


@functools.lru_cache(maxsize=4096)
def _by_rdp(steps: tuple[tuple[float, int], ...], noise: float, delta: float) -> float:
    rdp = accounting().rdp
    total = sum(count * _one_step(rate, noise).rdp for rate, count in steps)
    return float(rdp.compute_epsilon(_one_step(steps[0][0], noise).orders, total, delta)[0])


@functools.lru_cache(maxsize=4096)
def _one_step(rate: float, noise: float) -> Any:
    """Return an accountant that has seen one step; RDP adds up over steps."""
    package, log = accounting(), logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of orders that do not converge, which it leaves out
    try:
        return package.rdp.RdpAccountant().compose(_event(rate, noise))
    finally:
        log.setLevel(level)


@functools.lru_cache(maxsize=4096)
def _by_pld(steps: tuple[tuple[float, int], ...], noise: float, delta: float) -> float:
    package = accounting()
    # losses reach 1/σ², so their grid is coarser with little noise, or it would not fit into memory; ε is still an upper bound
    accountant = package.pld.PLDAccountant(value_discretization_interval=1e-4 * max(1.0, (0.3 / noise) ** 2))
    try:
        for rate, count in steps:
            accountant.compose(_event(rate, noise), count)
        return float(accountant.get_epsilon(delta))
    except OverflowError:
        return math.inf


def _event(rate: float, noise: float) -> Any:
    package = accounting()
    return package.PoissonSampledDpEvent(rate, package.GaussianDpEvent(noise))


# ---- noise at the merge ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NoisyMean:
    """The mean of the clients' changes, each clipped to `clip`, with noise of deviation noise·clip on their sum.

    The sum is divided by the number of clients that are asked on average, whoever came: so one client more or less changes it
    by `clip` at most. McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018 (fixed
    denominator, clients sampled independently).
    """

    clip: float
    noise: float
    expected: float
    names: tuple[str, ...]  # what clients upload
    key: int
    release: Callable[[Tree], Secret] | None = None
    """Return what the noise is drawn from, given all that the mean follows from; None: it is drawn from `key`."""

    def __call__(self, trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
        """Return the model `around` moved by the noisy mean, over the entries that clients upload."""
        if around is None or len(set(weights)) > 1:
            raise ValueError("a private mean needs equal weights and the model that clients started from")
        start = {name: around[name].double() for name in self.names}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for entry in trees:
            change = {name: entry[name].double() - value for name, value in start.items()}
            length = max(float(tree.square_norm(change)) ** 0.5, self.clip)
            for name, value in change.items():
                total[name] += value * (self.clip / length)
        sizes, device = [value.numel() for value in start.values()], start[self.names[0]].device
        if self.release is None:
            noise = plan.normals(torch.tensor(self.key - (1 << 63), dtype=torch.int64, device=device), sum(sizes))
        else:
            uploads = {str(i): {name: entry[name] for name in self.names} for i, entry in enumerate(trees)}
            noise = self.release({"start": start, "uploads": uploads}).normals(sum(sizes)).to(device)
        drawn = torch.split(noise, sizes)
        return {
            name: (value + (total[name] + self.noise * self.clip * z.reshape(value.shape)) / self.expected).to(
                around[name].dtype
            )
            for (name, value), z in zip(start.items(), drawn, strict=True)
        }


class Hidden(Protocol):
    """What a server draws from where its clients know the seed."""

    secret: Secret

    def release(self, round: int, inputs: Tree) -> Secret:
        """Return what the noise of a round is drawn from: the same for the same inputs alone.

        Raises `TrainingError` where the mean of other inputs was given away in this round already: ε counts one.
        """


def noisy_mean(
    method: Method, task: Task, settings: Privacy, cohort: int, hidden: Hidden | None = None
) -> Callable[[Task, Tree], Average] | None:
    """Return what makes the mean of each round, where the server adds noise; `cohort` clients are asked on average."""
    if settings.privacy != "central":
        return None
    names = tuple(uploaded(method, task)["params"])

    def of_round(task: Task, server: Tree) -> Average:
        key = plan.key(task.seed, plan.NOISE, task.round)
        release = None if hidden is None else functools.partial(hidden.release, task.round)
        return NoisyMean(settings.clip_norm, settings.noise_multiplier, cohort, names, key, release)

    return of_round


def uploaded(method: Method, task: Task) -> Tree:
    """Return an upload of round 1, as far as names and shapes go."""
    task, first = dataclasses.replace(task, round=1), task.net.initial()
    return example_upload(method, task, method.send(task, method.init_server(task, first), 0))


# ---- what has been spent ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ledger:
    """Counts what a run's uploads have spent, from its records alone, and stops the run before it spends more than its budget.

    A record has `spent` and `epsilon`. Where the server adds noise, `spent` is the rounds so far at each sampling rate. Where
    clients do (`bench` is given), it is the steps so far of each client that was asked, whatever came of it; `epsilon` is then
    the most of any client, and `epsilon_clients` each one's.
    """

    settings: Privacy
    bench: Bench | None = None

    def __call__(self, history: Sequence[Mapping[str, Any]], cohort: Sequence[int], share: float) -> dict[str, Any]:
        """Return the entries of the next round's record; refuse the round where they exceed the budget or cannot be known."""
        spent, round = spent_so_far(history), len(history) + 1
        if spent and not math.isclose(self.total(spent), history[-1]["epsilon"], rel_tol=1e-3):
            what = f"ε {history[-1]['epsilon']:.4g} in the last record is not what its steps cost with these settings"
            raise TrainingError(f"round {round}: {what} ({self.total(spent):.4g}), so nothing is sent")
        steps = {str(min(1.0, share)): 1} if self.bench is None else self.steps(round, cohort)
        for unit, count in steps.items():
            spent[unit] = spent.get(unit, 0) + count
        each = {} if self.bench is None else {"epsilon_clients": self.of_clients(spent)}
        return {"spent": spent, "epsilon": self.allowed(round, self.total(spent)), **each}

    def total(self, spent: Mapping[str, int]) -> float:
        """Return ε of the rounds, or the largest of a client's."""
        if self.bench is None:
            return self.of_rounds(spent)
        return max(self.of_clients(spent).values(), default=0.0)

    def steps(self, round: int, clients: Sequence[int]) -> dict[str, int]:
        """Return how many steps of DP-SGD clients take in a round."""
        assert self.bench is not None
        bench, sizes = self.bench, self.bench.data.train.sizes
        lengths = [length for phase, length in bench.phases(round) if bench.private(phase)]
        return {str(k): sum(bench.plan.steps(sizes[k], length) for length in lengths) for k in clients}

    def of_rounds(self, spent: Mapping[str, int]) -> float:
        """Return ε of so many rounds at each sampling rate."""
        return self.epsilon({float(rate): count for rate, count in spent.items()})

    def of_clients(self, spent: Mapping[str, int]) -> dict[str, float]:
        """Return ε of each client's steps."""
        assert self.bench is not None
        sizes, b = self.bench.data.train.sizes, self.bench.plan.batch_size
        return {k: self.epsilon({min(b, sizes[int(k)]) / sizes[int(k)]: count}) for k, count in spent.items()}

    def epsilon(self, spent: Spent) -> float:
        """Return ε of so many steps at each rate, with the run's noise."""
        s = self.settings
        return epsilon(spent, s.noise_multiplier, s.privacy_delta, s.accountant)

    def allowed(self, round: int, epsilon: float) -> float:
        """Return ε, where it is a number within the budget; else the round does not begin."""
        limit = self.settings.privacy_budget or math.inf
        if not math.isfinite(epsilon):
            why = f"no bound can be computed with noise_multiplier {self.settings.noise_multiplier:g}"
            raise TrainingError(f"round {round}: ε is not known, so nothing is sent: {why}")
        if epsilon > limit:
            raise TrainingError(
                f"round {round}: the privacy budget is spent: ε would be {epsilon:.4g}, above {limit:g}. Nothing was sent"
            )
        return epsilon

    def affordable(self, rounds: int, total: Callable[[int], float]) -> None:
        """Refuse a budget that these rounds exceed, given what each number of rounds costs in all."""
        budget = self.settings.privacy_budget
        if budget and total(rounds) > budget:
            fits = bisect.bisect_right(range(1, rounds + 1), budget, key=total)
            right = f"at least {total(rounds):.4g}, the ε of {rounds} rounds (it allows {fits}), or more noise"
            raise InputError("privacy_budget", budget, right)


def spent_so_far(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return what the last record says was spent; refuse a history that does not say so, since ε would then be unknown."""
    for record in history:
        if not isinstance(record.get("epsilon"), float) or not isinstance(record.get("spent"), dict):
            raise TrainingError(
                f"round {record.get('round')}: its record does not say what was spent (epsilon, spent), so nothing is sent"
            )
    return dict(history[-1]["spent"]) if history else {}


def ledger(settings: Privacy, bench: Bench) -> Ledger | None:
    """Return what counts a run's privacy, where it has any."""
    if settings.privacy == "off":
        return None
    return Ledger(settings, bench if settings.privacy == "local" else None)


# ---- what is refused -------------------------------------------------------------------------------------------------
def sample_noise(settings: Privacy, batch_size: int) -> SampleNoise | None:
    """Return what clients do in each step, where they protect their samples."""
    if settings.privacy != "local":
        return None
    return SampleNoise(settings.clip_norm, settings.noise_multiplier, batch_size)


def check(method: Method, task: Task, settings: Privacy, cohort: int) -> None:
    """Refuse a method or a model that the analysis does not cover, a run without the package that computes ε, and one whose
    rounds, with `cohort` clients on average, cost more than its budget.
    """
    accounting(settings.privacy)
    name, kind = method.id or type(method).__name__, f"with privacy {settings.privacy!r}"
    if settings.privacy == "local":
        if not method.noisy_steps:
            right = (
                f"one whose uploads follow from gradients of samples alone {kind}, as fedavg ({name} does not say so)"
            )
            raise InputError("method", name, right)
        if task.net.buffers:
            right = f"without layers as BatchNorm, which mix samples, {kind}: GroupNorm"
            raise InputError("model", Shown(task.net.buffers[0]), right)
        return
    if not method.noisy_mean:
        right = f"one whose clients' uploads are only averaged {kind}, as fedavg ({name} does not say so)"
        raise InputError("method", name, right)
    if getattr(method, "mean", "uniform") != "uniform":
        right = f"'uniform' {kind}: no client may weigh more than another"
        raise InputError("mean", getattr(method, "mean", ""), right)
    if method.upload_varies:
        raise InputError("method", name, f"one that uploads the same entries in every round {kind}")
    example = uploaded(method, task)
    if set(example) != {"params"}:
        more = ", ".join(sorted(set(example) - {"params"}))
        raise InputError("method", name, f"one that uploads weights alone {kind}; {name} also uploads {more}")
    still = [entry for entry in example["params"] if entry not in task.net.parameters]
    if still:
        raise InputError("model", Shown(still[0]), f"without statistics such as BatchNorm's {kind}: use GroupNorm")
    ledger = Ledger(settings)
    ledger.affordable(task.rounds, lambda rounds: ledger.of_rounds({str(cohort / task.clients): rounds}))


def check_samples(bench: Bench, settings: Privacy, clients: Sequence[int], always: bool) -> None:
    """Refuse DP-SGD with a δ that means nothing for the largest of the clients that train, or a budget below what all rounds
    cost for sure: that is known where every client is `always` asked.
    """
    largest = max(bench.data.train.sizes[k] for k in clients)
    if settings.privacy_delta * largest >= 1:
        right = f"below 1/{largest}, one by the samples of the largest client"
        raise InputError("privacy_delta", settings.privacy_delta, right)
    ledger = Ledger(settings, bench)
    if not always:
        return

    def total(rounds: int) -> float:
        spent = dict.fromkeys(map(str, clients), 0)
        for t in range(1, rounds + 1):
            spent = {k: spent[k] + count for k, count in ledger.steps(t, clients).items()}
        return max(ledger.of_clients(spent).values())

    ledger.affordable(bench.task.rounds, total)


def words(method: Method, task: Task, settings: Privacy) -> str:
    """Describe a run's protection in one line, and what it does not cover."""
    clip, noise = f"{settings.clip_norm:g}", f"noise × {settings.noise_multiplier:g}"
    local = settings.privacy == "local"
    what = (
        f"each sample (local: its gradients clipped to {clip}, {noise} in each step; the most of any client)"
        if local
        else f"each client's changes (central: clipped to {clip}, {noise} at the server)"
    )
    line = f"{what}, at δ {settings.privacy_delta:g}, by {settings.accountant.upper()}"
    if "personal" not in method.scores:
        return line
    phases = method.phases(dataclasses.replace(task, round=1))
    if local and all(phase.model == "params" for phase in phases):
        return f"{line}; personal models stay home; the same steps trained them, so ε holds for them too"
    return f"{line}; personal models stay home and spend nothing: to publish one would reveal its data, without a bound"
