"""What determines a run: one frozen dataclass, read from TOML or flags, saved complete with the results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .. import methods
from ..core import settings
from ..core.errors import InputError, Shown, nearest
from ..core.method import Method
from ..core.settings import setting
from ..server.sampler import SAMPLERS
from ..timing import clock

_ROUNDS = ("min_battery", "max_load", "min_memory", "deadline", "over_select", "late", "wait_free")
TIMED = ("availability", "drop", "mode", *_ROUNDS)
ROUNDS = ("minimum", *_ROUNDS)  # what only synchronous rounds have


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a federation is trained. These are `simulate`'s keywords, and flags and TOML keys by the same names."""

    rounds: int = setting(30, "communication rounds", least=1, group="federation")
    participation: float = setting(1.0, "share of the clients asked each round", above=0, most=1, group="federation")
    epochs: int = setting(5, "passes over its data that a client makes each round", least=1, group="local training")
    batch_size: int = setting(16, "samples a step; a client with fewer uses them all", least=1, group="local training")
    lr: float = setting(0.05, "learning rate η of SGD", above=0, group="local training")
    momentum: float = setting(
        0.9, "momentum of SGD; its state starts fresh each round", least=0, most=1, group="local training"
    )
    nesterov: bool = setting(False, "Nesterov's momentum", group="local training")
    weight_decay: float = setting(0.0, "weight decay of SGD", least=0, group="local training")
    seed: int = setting(
        0,
        "seed of everything random: partition, weights, cohorts, batches, dropout",
        least=0,
        most=2**63 - 1,
        group="federation",
    )
    server: Literal["mean", "momentum", "adam", "yogi"] = setting(
        "mean", "what the server makes of the clients' mean: the mean itself, or a step towards it", group="server"
    )
    server_lr: float = setting(
        0.0, "η of the server's step; 0: 1 for momentum, 0.01 for adam and yogi", least=0, group="server"
    )
    server_momentum: float = setting(0.9, "β₁ of the server's step", least=0, most=1, group="server")
    server_beta2: float = setting(0.99, "β₂ of adam's and yogi's step", least=0, most=1, group="server")
    server_tau: float = setting(1e-3, "τ of adam's and yogi's step", above=0, group="server")
    dtype: Literal["float32", "float64"] = setting("float32", "precision", group="machine")
    device: str = setting("auto", "cpu, cuda, cuda:1, …; auto takes a GPU where there is one", group="machine")
    engine: Literal["auto", "one", "stacked"] = setting(
        "auto", "train clients one by one, or stacked in one step; auto picks by device and model", group="machine"
    )
    cohort: int = setting(0, "clients stacked at once; 0: all of a round's that fit", least=0, group="machine")
    workers: int = setting(
        0,
        "processes that train clients one by one on a CPU; 0: one a core, at most a round's clients",
        least=0,
        group="machine",
    )
    fast: bool = setting(True, "use the fused and compiled fast paths (same numbers to rounding)", group="machine")
    bank: float = setting(
        0.0, "GiB of the GPU that clients' memories may take; the rest lies on the host, then on disk; 0: a quarter", least=0,
        group="machine",
    )  # fmt: skip
    compile: Literal["auto", "on", "off", "traced"] = setting(
        "auto", "compile the stacked step; auto: on a GPU, for runs of 2,000 steps or more", group="machine"
    )
    precision: Literal["tf32", "bf16", "full"] = setting(
        "tf32", "products of float32 numbers: TF32 where the GPU has it, bfloat16, or in full", group="machine"
    )
    eval_every: int = setting(
        1, "score all clients every so many rounds, and after the last", least=1, group="federation"
    )
    sampler: str = setting(
        "uniform", "who is asked: uniform, size, available, power-of-choice, round-robin", group="federation"
    )
    candidates: int = setting(
        0, "power-of-choice: clients drawn, of whom those with the highest loss are asked; 0: twice as many", least=0,
        group="federation",
    )  # fmt: skip
    profile: str = setting(
        "",
        "simulate time on these devices: uniform, lognormal:σ, file:devices.csv; empty: no simulated time",
        group="time",
    )
    availability: float = setting(
        1.0, "share of the rounds in which a client can be asked", above=0, most=1, group="time"
    )
    drop: float = setting(0.0, "chance that a client drops out of a round", least=0, most=1, group="time")
    min_battery: float = setting(0.0, "a client refuses work below this charge", least=0, most=1, group="time")
    max_load: float = setting(1.0, "a client refuses work above this load", least=0, most=1, group="time")
    min_memory: float = setting(
        0.0, "a client refuses work below this share of free memory", least=0, most=1, group="time"
    )
    deadline: float = setting(
        0.0, "simulated seconds after which a round ends; 0: when all that answer have done so", least=0, group="time"
    )
    over_select: float = setting(
        1.0,
        "ask so many times the clients that are wanted, and take the first that answer",
        least=1,
        most=100,
        group="time",
    )
    minimum: int = setting(1, "replies below which a round is abandoned, the model unchanged", least=1, group="time")
    late: Literal["drop", "fold"] = setting(
        "drop", "replies that come too late: dropped, or merged in the round in which they arrive", group="time"
    )
    mode: Literal["sync", "fedasync", "fedbuff"] = setting(
        "sync", "merge round by round, each reply as it comes (FedAsync), or every so many (FedBuff)", group="time"
    )
    buffer: int = setting(
        0, "K, replies that FedBuff merges at a time; 0: 10, or all that are at work", least=0, group="time"
    )
    mixing: float = setting(0.6, "α, a fresh reply's share in FedAsync", above=0, most=1, group="time")
    staleness: Literal["constant", "hinge", "polynomial"] = setting(
        "polynomial", "how the weight of a reply falls that began with an older model", group="time"
    )
    staleness_a: float = setting(
        0.0, "a, its slope or power; 0: 10 for hinge, 0.5 for polynomial", least=0, group="time"
    )
    staleness_b: int = setting(4, "b, the staleness up to which hinge weighs in full", least=0, group="time")
    wait_free: Literal["off", "fixed", "until-download"] = setting(
        "off", "upload before personal training, which goes on meanwhile: for its usual steps, or until the next download",
        group="time",
    )  # fmt: skip
    personal_cap: int = setting(
        0, "the most personal steps until the next download; 0: no limit", least=0, group="time"
    )
    unselected: Literal["cap", "broadcast"] = setting(
        "cap", "personal training of clients that are not asked: up to the cap, or from a model sent to everybody each round",
        group="time",
    )  # fmt: skip
    new: bool = setting(False, "score all clients' models together, owner of a sample unknown (New)", group="scores")
    averaged: bool = setting(
        False, "score the mean of the personal models of methods without a generic one", group="scores"
    )
    forgetting: bool = setting(
        False, "each round, score what participants download against what they had trained", group="scores"
    )
    fine_tune: int = setting(0, "epochs that each client trains on after the federation (+FT)", least=0, group="scores")
    fine_tune_part: Literal["head", "all"] = setting("head", "what these epochs train", group="scores")
    newcomers: int = setting(0, "clients, by the seed, that join only after the federation", least=0, group="scores")
    join_epochs: int = setting(5, "epochs that a newcomer then trains on its own data", least=1, group="scores")

    def __post_init__(self) -> None:
        settings.check(self)
        if self.nesterov and not self.momentum:
            raise InputError("nesterov", True, "false, or a momentum above 0")
        if self.sampler not in SAMPLERS:
            raise InputError("sampler", self.sampler, nearest(self.sampler, SAMPLERS))
        default = {f.name: f.default for f in settings.fields_of(Training)}
        for name in ROUNDS if self.mode != "sync" else ():
            if getattr(self, name) != default[name]:
                right = f"{default[name]!r} with mode {self.mode!r}, which has no rounds that end"
                raise InputError(name, getattr(self, name), right)
        rests = self.participation < 1 or self.availability < 1
        until = self.profile and self.wait_free == "until-download"
        if until and rests and not self.personal_cap and self.unselected == "cap":
            right = "a number of steps for clients that are not asked in a round, or unselected 'broadcast'"
            raise InputError("personal_cap", 0, right)
        if self.profile:
            clock.parse(self.profile)
            return
        for name in TIMED:
            if getattr(self, name) != default[name]:
                right = f"{default[name]!r} without a profile of devices, as uniform"
                raise InputError(name, getattr(self, name), right)
        if self.sampler == "available":
            raise InputError("sampler", self.sampler, "another without a profile of devices, as uniform")


@dataclass(frozen=True, kw_only=True)
class Experiment(Training):
    """A whole run: a method, data and how they are divided, a model, and the training."""

    method: Method = field(default_factory=lambda: methods.get("pfedsd")())
    data: str = setting(
        "digits", "a data set by name ('fedstill data' lists them), or a path to your own files", group="data"
    )
    data_root: str = setting("", "folder with data sets; else FEDSTILL_DATA, else the cache folder", group="data")
    clients: int = setting(0, "number of clients; 0: as many as the data says, else 20", least=0, group="data")
    partition: str = setting(
        "auto",
        "auto (the data's own owners or domains, else dirichlet:0.1), iid, dirichlet:α, "
        " balanced-dirichlet:α, shards:s, classes:S, lognormal:σ, domain, owner, file:PATH",
        group="data",
    )
    split: str = setting(
        "80/20", "train/test (80/20) or train/val/test (70/10/20) per client, or official", group="data"
    )
    pool: Literal["all", "train"] = setting(
        "all", "divide train and test together, or the training part only", group="data"
    )
    model: str = setting("mlp", "a model by name ('fedstill models' lists them)", group="model")
    head: tuple[str, ...] = setting((), "the modules that make the head; empty: as the model says", group="model")
    external: str = setting("", "also score on data that no client has: a name or path, as data", group="scores")
    checkpoint_every: int = setting(
        10, "keep the state every so many rounds, and after the last", least=1, group="machine"
    )

    def dealt(self, owned: str | None) -> Experiment:
        """This experiment with partition and clients said: `owned` is what the data itself divides by, if anything."""
        partition = self.partition if self.partition != "auto" else owned or "dirichlet:0.1"
        by_data = partition.partition(":")[0] in ("owner", "domain", "file")
        return replace(self, partition=partition, clients=self.clients or (0 if by_data else 20))

    def training(self) -> Training:
        """The part that `simulate` takes."""
        return Training(**{f.name: getattr(self, f.name) for f in settings.fields_of(Training)})

    def to_toml(self) -> str:
        """The complete experiment as TOML."""
        return to_toml(self, self.method)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Experiment:
        """From plain names and values, the method under `method` (its id, or a table with `id` and fields)."""
        values = dict(values)
        table = values.pop("method", None)
        if table is not None:
            values["method"] = method_from(table)
        known = {f.name for f in settings.fields_of(cls)} | {"method"}
        for name in values:
            if name not in known:
                raise InputError(name, values[name], f"left out, or did you mean {nearest(name, known)}")
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path) -> Experiment:
        """From a file; what it leaves out has its default."""
        path = Path(path)
        if not path.is_file():
            raise InputError("experiment", str(path), "a TOML file that is there")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError("experiment", str(path), f"valid TOML ({error})") from error
        return cls.from_values(values)


def to_toml(training: Training, method: Method, **more: object) -> str:
    """All settings of a run as TOML, no default left unsaid."""
    values = {**more, **settings.values_of(training)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
    lines += ["", "[method]", f"id = {_toml(method.id)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.values_of(method).items()]
    return "\n".join(lines) + "\n"


def method_from(table: object) -> Method:
    """A method from its id, or from a table with `id` and fields."""
    if isinstance(table, str):
        table = {"id": table}
    if not isinstance(table, Mapping) or not isinstance(table.get("id"), str):
        raise InputError("method", Shown(str(table)), "an id, or a table with an 'id'")
    fields = {name: value for name, value in table.items() if name != "id"}
    return settings.build(methods.get(table["id"]), fields, where="method.")


def _toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
