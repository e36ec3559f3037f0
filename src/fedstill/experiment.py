"""What determines a run: one frozen dataclass, read from TOML or flags, saved complete with the results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from . import methods, settings
from .errors import InputError, Shown, nearest
from .method import Method
from .settings import setting


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
    dtype: Literal["float32", "float64"] = setting("float32", "precision", group="machine")
    device: str = setting("auto", "cpu, cuda, cuda:1, …; auto takes a GPU where there is one", group="machine")
    engine: Literal["auto", "one", "stacked"] = setting(
        "auto", "train clients one by one, or stacked in one step; auto picks by device and model", group="machine"
    )
    cohort: int = setting(0, "clients stacked at once; 0: all of a round's", least=0, group="machine")
    eval_every: int = setting(
        1, "score all clients every so many rounds, and after the last", least=1, group="federation"
    )
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
