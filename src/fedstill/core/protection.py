"""Settings that protect a federation: which uploads are accepted, what a merge tolerates, and what uploads may reveal.

The groups stand beside those of `core.training`; `run.experiment.Training` inherits from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import InputError
from .settings import Group, setting

POISONS = ("label-flip", "backdoor")  # attacks on the attackers' own training data


@dataclass(frozen=True, kw_only=True)
class Acceptance(Group):
    """Which replies the server accepts, and what happens when a client's own training diverges."""

    on_divergence: Literal["stop", "refuse"] = setting(
        "stop", "where a client's own training diverges: stop the run, or refuse its upload", group="server"
    )
    max_norm: float = setting(
        0.0, "largest norm of an upload's difference from what was sent; 0: any", least=0, group="server"
    )
    over_norm: Literal["reject", "clip"] = setting(
        "reject", "what becomes of an upload above max_norm: refused, or moved towards what was sent", group="server"
    )
    max_share: float = setting(
        0.9, "largest share of a round's samples that a client may claim where its number is not registered",
        above=0, most=1, group="server",
    )  # fmt: skip
    max_upload: float = setting(
        0.0,
        "MiB that a reply may have on the wire; 0: twice those of a right upload",
        least=0,
        most=2**20,
        group="server",
    )

    def unused(self) -> dict[str, str]:
        """Return what has no effect where no norm is bounded."""
        return super().unused() | ({} if self.max_norm else {"over_norm": "without `max_norm`"})


@dataclass(frozen=True, kw_only=True)
class Robustness(Group):
    """What the server makes of uploads of which some may be forged; and, for research, simulated attackers."""

    average: Literal[
        "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-clip", "fltrust"
    ] = setting(
        "mean", "the clients' mean, or a rule in its place that tolerates forged uploads", group="robustness"
    )  # fmt: skip
    suspected: float = setting(
        0.2, "trimmed-mean, krum, multi-krum: uploads of a round that may be forged, a share below 0.5 or a number",
        least=0, group="robustness",
    )  # fmt: skip
    clip_to: float = setting(
        0.0, "norm-clip: the longest change of an upload; 0: the median of the round's", least=0, group="robustness"
    )

    root_samples: int = setting(
        100, "fltrust: samples that the server owns, from the common test set, else drawn from the clients' training data",
        least=1, group="robustness",
    )  # fmt: skip
    attack: Literal["none", "sign-flip", "gaussian", "alie", "inner-product", "label-flip", "backdoor"] = setting(
        "none", "simulated attackers: forged uploads (the first four) or poisoned training data", group="robustness"
    )
    attackers: float = setting(
        0.2, "clients that attack, drawn from the seed: a share or a number", above=0, group="robustness"
    )
    attack_strength: float = setting(
        0.0, "s of a forged upload, or the share of an attacker's samples that is poisoned; 0: the attack's own (docs/robust.md)",
        least=0, group="robustness",
    )  # fmt: skip
    backdoor_target: int = setting(0, "the class that the backdoor's trigger should give", least=0, group="robustness")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attackers > 1 and self.attackers % 1:
            raise InputError("attackers", self.attackers, "a share below 1, or a whole number")
        if self.attack in POISONS and self.attack_strength > 1:
            raise InputError("attack_strength", self.attack_strength, f"a share with {self.attack}: at most 1")
        if 0.5 <= self.suspected < 1 or (self.suspected > 1 and self.suspected % 1):
            raise InputError("suspected", self.suspected, "a share below 0.5, or a whole number")

    def unused(self) -> dict[str, str]:
        """Return what belongs to a rule that is not asked for."""
        unused = super().unused()
        if self.average not in ("trimmed-mean", "krum", "multi-krum"):
            unused["suspected"] = "without `average` trimmed-mean, krum or multi-krum"
        if self.average != "norm-clip":
            unused["clip_to"] = "without `average` norm-clip"
        if self.average != "fltrust":
            unused["root_samples"] = "without `average` fltrust"
        if self.attack == "none":
            unused |= dict.fromkeys(("attackers", "attack_strength"), "without `attack`")
        if self.attack != "backdoor":
            unused["backdoor_target"] = "without `attack` backdoor"
        return unused


@dataclass(frozen=True, kw_only=True)
class Privacy(Group):
    """Differential privacy of what clients upload: DP-SGD at the client, or noise at the server's merge."""

    privacy: Literal["off", "local", "central"] = setting(
        "off", "differential privacy: of each sample, by DP-SGD at its client (local), or of each client, by noise at the server",
        group="privacy",
    )  # fmt: skip
    noise_multiplier: float = setting(
        1.0, "σ, deviation of the noise as a multiple of `clip_norm`", above=0, group="privacy"
    )
    clip_norm: float = setting(
        1.0, "C, the longest gradient of one sample, or change of one client", above=0, group="privacy"
    )
    privacy_delta: float = setting(1e-5, "δ at which ε is reported", above=0, most=0.1, group="privacy")
    privacy_budget: float = setting(
        0.0, "ε at which the run stops before it sends more; 0: no limit", least=0, group="privacy"
    )
    accountant: Literal["rdp", "pld"] = setting(
        "rdp",
        "how ε is computed: by Rényi divergences, or by the privacy loss itself (tighter, slower)",
        group="privacy",
    )

    def unused(self) -> dict[str, str]:
        """Return the numbers of a protection that is off."""
        unused = super().unused()
        if self.privacy == "off":
            names = ("noise_multiplier", "clip_norm", "privacy_delta", "privacy_budget", "accountant")
            unused |= dict.fromkeys(names, "without `privacy`")
        return unused
