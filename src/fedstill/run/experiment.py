"""What determines a run: `Training`, the keywords of `simulate`, and `Experiment`, which also names method, data and model.

Both are frozen dataclasses that are read from TOML or flags and saved completely with the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from .. import methods
from ..core import reading, settings
from ..core.errors import InputError, Shown, check_path, nearest
from ..core.method import Method
from ..core.protection import Acceptance, Privacy, Robustness
from ..core.reading import Unreadable, read_json
from ..core.settings import setting
from ..core.training import Adapters, FederationSettings, FurtherScores, LocalTraining, Machine, ServerOptimizer, Timing
from ..data.rules import Preprocessing
from ..nn.lora import Lora
from ..server.sampler import BY_PLAN, SAMPLERS
from ..timing import clock
from .evaluate import FURTHER, Evaluation

FORMAT = 3  # of a run folder, in its environment.json; raised when older folders cannot be resumed


@dataclass(frozen=True, kw_only=True)
class Training(
    Privacy,
    Robustness,
    Acceptance,
    FurtherScores,
    Timing,
    Machine,
    ServerOptimizer,
    Adapters,
    LocalTraining,
    FederationSettings,
):  # the last base's fields come first
    """How a federation is trained. The fields are `simulate`'s keywords, and flags and TOML keys by the same names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler not in SAMPLERS:
            raise InputError("sampler", self.sampler, nearest(self.sampler, SAMPLERS))
        if self.simulates_time:
            clock.parse(self.profile)
        elif self.sampler == "available":
            raise InputError("sampler", self.sampler, "another without a profile of devices, as uniform")
        if self.lora:
            Lora.parse(self.lora)
        self._check_contract()
        if self.further_every % self.eval_every:
            right = f"a multiple of eval_every ({self.eval_every}): further scores stand in rounds that are scored"
            raise InputError("further_every", self.further_every, right)
        if self.patience:
            self._check_patience()
        if self.wait_free == "until-download" and self.forgetting:
            raise InputError(
                "forgetting", True, "false with wait_free 'until-download': nobody knows when training ends"
            )
        some_rest = self.participation < 1 or self.availability < 1
        capped = self.personal_cap or self.unselected == "broadcast"
        if self.wait_free == "until-download" and some_rest and not capped:
            right = "a number of steps for clients that are not asked in a round, or unselected 'broadcast'"
            raise InputError("personal_cap", 0, right)

    def _check_contract(self) -> None:
        """Refuse a contract that no run with these settings could fulfil; `score_…` are its fields here."""
        try:
            Evaluation.by(self)
        except InputError as error:
            raise InputError(f"score_{error.field}", error.value, error.right) from None
        needs = {"fine-tuned": "fine_tune", "new": "new", "averaged": "averaged", "newcomers": "newcomers"}
        needed = needs.get(self.score_model)
        if needed is not None and not getattr(self, needed):
            raise InputError("score_model", self.score_model, f"'personal' or 'generic' without {needed}")
        if self.score_model in FURTHER and self.score_round != "last" and not self.further_every:
            right = f"'last' without further_every, which scores {self.score_model} by round"
            raise InputError("score_round", self.score_round, right)

    def _check_patience(self) -> None:
        """Refuse to stop early where no data are named that choose the round, or a round's models cannot be kept."""
        if self.score_round not in ("best-val", "best-test"):
            right = (
                "0, or with score_round 'best-val' (which needs validation data, as split 70/10/20 makes them); "
                "'best-test' chooses the round on the test data, and every result says so"
            )
            raise InputError("patience", self.patience, right)
        if self.wait_free != "off":
            right = f"0 with wait_free {self.wait_free!r}: personal training goes on when a round is over"
            raise InputError("patience", self.patience, right)

    def unused(self) -> dict[str, str]:
        """Return the fields that have no effect, given the others of all groups."""
        unused = super().unused()
        if self.mode == "fedbuff":
            unused.pop("server_lr", None)  # FedBuff's own η
        if self.sampler in BY_PLAN:
            unused["candidates"] = f"on the sampler {self.sampler}"
        return unused


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
        " balanced-dirichlet:α, shards:s, classes:S, classes:S,lognormal:σ, lognormal:σ, domain, owner, file:PATH",
        group="data",
    )
    objective: Literal["auto", "classification", "multilabel", "regression", "tokens"] = setting(
        "auto", "what is learned; auto: as form and type of the targets say", group="data"
    )
    label: str = setting(
        "",
        "the column of the labels, of tables and hf:FOLDER; several with commas; empty: label or y, else the last",
        group="data",
    )
    input: str = setting(
        "",
        "the columns of samples of hf:FOLDER, joined by commas; empty: image, input_ids, x, …, else all",
        group="data",
    )
    owner: str = setting("", "the column of hf:FOLDER whose every value is a client, by that name", group="data")
    split: str = setting(
        "80/20", "train/test (80/20) or train/val/test (70/10/20) per client, or official", group="data"
    )
    pool: Literal["all", "train"] = setting(
        "all", "divide train and test together, or the training part only", group="data"
    )
    ignore: str = setting("", "columns of CSV files to leave out, by name, with commas", group="data")
    impute: str = setting(
        "none",
        "gaps in tables: none (refused), drop (the sample), mean (of all sites' training samples, by sums; mean:site: of each "
        "site's own), median (of each site's own)",
        group="data",
    )
    encode: str = setting(
        "none",
        "texts in tables: none (refused), onehot (a column for each text), onehot:A,B (of A and B too, whatever they hold)",
        group="data",
    )
    normalise: Literal["auto", "none", "site", "federated"] = setting(
        "auto",
        "numbers to mean 0 and deviation 1 by training samples: none, site (each site's own), federated (all sites', by sums); "
        "auto: images as their source says, tables not at all",
        group="data",
    )
    memory_map: Literal["auto", "on", "off"] = setting(
        "auto",
        "leave images and npy files on disk and read them when they are needed; auto: if they would take half of the memory; "
        " the numbers are the same",
        group="data",
    )
    model: str = setting(
        "mlp",
        "a model by name ('fedstill models' lists them), timm:NAME, hf:NAME or hf:FOLDER, or your own: net.py:Net, module:Net",
        group="model",
    )
    model_args: str = setting("", "arguments of such a model: img_size=32,drop_path_rate=0.1", group="model")
    weights: str = setting("", "weights to start from: a file.safetensors of the same model", group="model")
    head: tuple[str, ...] = setting((), "the modules that make the head; empty: as the model says", group="model")
    external: str = setting("", "also score on data that no client has: a name or path, as data", group="scores")
    checkpoint_every: int = setting(
        0,
        "keep the state every so many rounds, and after the last; 0: at least every 10, "
        " and as often as that takes less than a fiftieth of the time",
        least=0,
        group="machine",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_method(self.method)
        self.preprocessing()  # refuses rules that there are not

    def preprocessing(self) -> Preprocessing:
        """Return what is done with the samples before they are trained on."""
        return Preprocessing(**{f.name: getattr(self, f.name) for f in fields(Preprocessing)})

    def dealt(self, owned: str | None) -> Experiment:
        """Return the experiment with its partition and number of clients filled in.

        `owned` is how the data itself is divided, "owner" or "domain" ("iid" where samples have no single class), if at all.
        """
        partition = self.partition if self.partition != "auto" else owned or "dirichlet:0.1"
        by_data = partition.partition(":")[0] in ("owner", "domain", "file")
        return replace(self, partition=partition, clients=self.clients or (0 if by_data else 20))

    def training(self) -> Training:
        """Return the settings of training alone, which are the keywords of `simulate`."""
        return Training(**{f.name: getattr(self, f.name) for f in settings.fields_of(Training)})

    def to_toml(self) -> str:
        """Return the complete experiment as TOML."""
        return to_toml(self, self.method)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Experiment:
        """Return the experiment with these values; `method` is a method's id, or a table with `id` and its fields."""
        if not isinstance(values, Mapping):
            raise InputError("experiment", Shown(type(values).__name__), "a mapping of names to values")
        known = {f.name for f in settings.fields_of(cls)} | {"method"}
        for name in values:
            if name not in known:
                raise InputError(name, values[name], f"left out, or did you mean {nearest(name, known)}")
        if "method" in values:
            values = {**values, "method": method_from(values["method"])}
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path) -> Experiment:
        """Return the experiment that a TOML file describes; what the file leaves out has its default."""
        check_path("experiment", path)
        path = Path(path)
        try:
            values = reading.read_toml(path)
        except reading.Missing:
            raise InputError("experiment", str(path), "a TOML file that exists") from None
        except reading.Unreadable as error:
            raise InputError("experiment", str(path), str(error)) from None
        return cls.from_values(values)


def to_toml(training: Training, method: Method, **first: object) -> str:
    """Return all settings of a run as TOML, including those with default values; `first` precedes them."""
    values = {**first, **settings.values_of(training)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
    lines += ["", "[method]", f"id = {_toml(methods.name_of(method))}"]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.values_of(method).items()]
    return "\n".join(lines) + "\n"


def check_format(folder: str | Path) -> None:
    """Refuse to resume a run that was written in another format; the message names the version that wrote it."""
    try:
        environment = read_json(Path(folder) / "environment.json")
    except Unreadable:
        environment = {}
    if environment.get("format") != FORMAT:
        version, format = environment.get("fedstill", "of an unknown version"), environment.get("format", 1)
        right = f"a run in format {FORMAT}: fedstill {version} wrote this one in format {format}"
        again = f"'fedstill run {Path(folder) / 'experiment.toml'}' runs it again"
        raise InputError("folder", str(folder), f"{right}; {again}")


def check_method(method: object) -> None:
    """Refuse what is no method, with the hint that its class or name is none either."""
    if not isinstance(method, Method):
        raise InputError("method", Shown(repr(method)), "a method such as fedstill.PFedSD(), not its class or name")


def method_from(table: object) -> Method:
    """Return the method that an id, or a table with `id` and fields, describes."""
    if isinstance(table, str):
        table = {"id": table}
    if not isinstance(table, Mapping) or not isinstance(table.get("id"), str):
        raise InputError("method", Shown(str(table)), "an id, or a table with an 'id'")
    fields = {name: value for name, value in table.items() if name != "id"}
    return settings.build(methods.get(table["id"]), fields, where="method.")


def _toml(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
