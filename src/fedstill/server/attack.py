"""Simulated attackers, for research: what they upload in place of what they trained.

An attacker trains as everybody does, on its own data (poisoned before the run by `label-flip` and `backdoor`: `data/poison.py`).
Its upload is then forged before the gate sees it. u is what it trained, w what a client uploads that has not trained (for a
method whose uploads are models the downloaded one, for one whose uploads are changes 0), s the strength:

    sign-flip      w − s·(u − w)                       s = 5     Li et al., "RSA", AAAI 2019
    gaussian       w + s·z,  z ~ N(0, 1)               s = 10    Blanchard et al., NeurIPS 2017
    alie           μ − s·σ                             s = z_max Baruch et al., "A Little Is Enough", NeurIPS 2019
    inner-product  w − s·(μ − w)                       s = 5     Xie, Koyejo and Gupta, "Fall of Empires", UAI 2019

μ and σ are the mean and the standard deviation of the round's honest uploads, coordinate by coordinate: these two attackers see
everything (omniscient). z_max = Φ⁻¹((n − ⌊n/2 + 1⌋)/(n − m)) for m attackers among n uploads.

Choices: (1) Forged are the entries of an upload that are named as a trainable parameter; BatchNorm's statistics, which a
forger would betray itself by, and counts of samples and classes are sent as they are. (2) All attackers of a round send the same
ALIE or inner-product upload; their noise differs. (3) Who attacks is drawn from the seed, for the whole run. (4) z_max is taken
between 0 and Φ⁻¹(0.99), for rounds with hardly an honest client. (5) Where a round has no honest upload that can be merged,
an omniscient attacker sends what it trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from ..core import plan, tree
from ..core.errors import InputError
from ..core.protection import POISONS, Robustness
from ..core.tree import Params, Tree
from ..transport.messages import Reply

STRENGTH = {"sign-flip": 5.0, "gaussian": 10.0, "inner-product": 5.0, "label-flip": 1.0, "backdoor": 0.5}
OMNISCIENT = ("alie", "inner-product")


@dataclass(frozen=True)
class Attack:
    """Who attacks, and how."""

    kind: str
    clients: frozenset[int]
    strength: float  # of alie 0: z_max
    seed: int

    @classmethod
    def of(cls, settings: Robustness, seed: int, clients: Sequence[int]) -> Attack | None:
        """Return the attack that a run asks for, by some of these clients; None where there is none."""
        if settings.attack == "none":
            return None
        number = attacking(settings.attackers, len(clients))
        if not 0 < number < len(clients):
            right = f"a share or a number that makes 1 to {len(clients) - 1} of the {len(clients)} clients attackers"
            raise InputError("attackers", settings.attackers, right)
        drawn = plan.permutation(plan.key(seed, plan.ATTACK), len(clients))[:number]
        strength = settings.attack_strength or STRENGTH.get(settings.attack, 0.0)
        return cls(settings.attack, frozenset(clients[int(i)] for i in drawn), strength, seed)

    def forge(self, replies: Sequence[Reply], names: Sequence[str], untrained: Callable[[Reply], Tree]) -> list[Reply]:
        """Return a round's replies with the attackers' uploads forged.

        `names` are those of trainable parameters; `untrained(reply)` gives what its client would upload without training.
        """
        sound = [reply for reply in replies if not reply.refusal and not reply.fault]
        mine = [reply for reply in sound if reply.client in self.clients]
        if self.kind in POISONS or not mine:
            return list(replies)
        known: list[Params] = []
        if self.kind in OMNISCIENT:
            honest = [reply.up for reply in sound if reply.client not in self.clients]
            known = [
                tree.flatten(up) for up, norm in zip(honest, tree.norms(honest), strict=True) if math.isfinite(norm)
            ]
        scale = self.strength or z_max(len(known) + len(mine), len(mine))
        forged = {}
        for reply in mine:
            flat = tree.flatten(reply.up)
            base = tree.flatten(untrained(reply))
            new: Params = {}
            for place, (name, sent) in enumerate(flat.items()):
                if name.split(tree.SEPARATOR)[-1] in names and name in base and base[name].shape == sent.shape:
                    others = [one[name] for one in known if name in one and one[name].shape == sent.shape]
                    new[name] = self._forged(reply, place, sent, base[name], others, scale)
            forged[id(reply)] = replace(reply, up=tree.fill(tree.outline(reply.up), {**flat, **new}))
        return [forged.get(id(reply), reply) for reply in replies]

    def _forged(
        self, reply: Reply, place: int, sent: Tensor, base: Tensor, others: Sequence[Tensor], scale: float
    ) -> Tensor:
        """Return what stands for one entry of an upload; `others` are the honest clients'."""
        if self.kind == "sign-flip":
            return base - scale * (sent - base)
        if self.kind == "gaussian":
            return base + scale * self._noise(reply, place, sent)
        if not others:
            return sent
        stacked = torch.stack(list(others)).double()
        mean = stacked.mean(0)
        if self.kind == "alie":
            return (mean - scale * stacked.std(0, correction=0)).to(sent.dtype)
        return (base - scale * (mean - base)).to(sent.dtype)

    def _noise(self, reply: Reply, place: int, like: Tensor) -> Tensor:
        """Draw standard normal numbers from the seed, the round, the client and the entry (Box and Muller)."""
        key = plan.key(self.seed, plan.ATTACK, reply.round, reply.client, place) >> 33
        words = [plan.uniform_bits(torch.tensor(key, device=like.device), side, like.shape) for side in (0, 1)]
        u, v = ((bits.double() + 0.5) / 2**32 for bits in words)
        return ((-2 * u.log()).sqrt() * (2 * math.pi * v).cos()).to(like.dtype)


def attacking(attackers: float, clients: int) -> int:
    """Return how many of the clients attack: `attackers` itself from 1 on, else that share, rounded to the nearest.

    >>> attacking(0.2, 20), attacking(3, 20)
    (4, 3)
    """
    return int(attackers) if attackers >= 1 else int(attackers * clients + 0.5)


def z_max(n: int, m: int) -> float:
    """Return how many standard deviations m of n uploads can move and still stand before enough of the honest ones.

    >>> round(z_max(50, 24), 2), round(z_max(20, 4), 2)
    (1.43, 0.16)
    """
    share = (n - (n // 2 + 1)) / max(1, n - m)
    return NormalDist().inv_cdf(min(0.99, max(0.5, share)))
