"""A paper's table or figure: its cells, each with an experiment, a contract of evaluation and the number, if one is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ..core.errors import InputError, nearest
from .files import values, vary

Kind = Literal["table", "figure"]
Model = Literal["personal", "generic", "fine-tuned", "new", "external", "averaged", "newcomers"]
Clients = Literal["all", "participants", "common"]
Mean = Literal["client", "sample", "training"]
Round = Literal["last", "mean10", "best-test", "best-val"]
Relation = Literal["=", "≈", ">", "<"]


class Metric(NamedTuple):
    """A kind of number or curve that a cell holds."""

    unit: str
    what: str
    curve: bool = False
    parts: tuple[str, ...] = ("",)


METRICS = {
    "accuracy": Metric("%", "accuracy of a model, as the contract has it"),
    "loss": Metric("", "training loss of a round: the data term alone, mean over the participants' steps"),
    "client-std": Metric("%", "standard deviation (n) over the clients' accuracies"),
    "improvement": Metric("%", "accuracy divided by the reference's, less one"),
    "rounds-to-target": Metric("rounds", "rounds until the accuracy is the target, or the reference's"),
    "rounds-speedup": Metric("×", "the reference's rounds to the target, divided by the cell's"),
    "time-speedup": Metric("×", "the reference's simulated seconds to the target, divided by the cell's"),
    "seconds": Metric("s", "measured time of a round"),
    "time-share": Metric("%", "share of a round's time", parts=("communication", "client", "server")),
    "megabytes": Metric("MB", "communication of a client in a round, down and up", parts=("bytes", "numbers")),
    "flops": Metric("GFLOPs", "computation of a client in a round", parts=("flops", "multiply-adds")),
    "accuracy-curve": Metric("%", "accuracy by round", curve=True),
    "loss-curve": Metric("", "training loss by round: the data term alone", curve=True),
    "forgetting": Metric(
        "%",
        "accuracy of the download, or of the model last trained, of participants by round",
        curve=True,
        parts=("downloaded", "trained"),
    ),
    "client-accuracies": Metric("%", "the clients' accuracies, as a distribution", curve=True),
    "partition": Metric("", "samples by client and class", curve=True),
}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Which number a cell is, in the words of `fedstill.Evaluation` and beyond them.

    `clients` may also be one client's number, and `round` a round. `reference` says with what a relative number compares, as
    overrides of the cell's own experiment: the id of another method of the paper, or fields. `target` is an accuracy in per cent;
    `part` is what the metric divides into (`METRICS`).
    """

    metric: str = "accuracy"
    model: Model = "personal"
    clients: Clients | int = "all"
    mean: Mean = "client"
    round: Round | int = "last"
    target: float | None = None
    reference: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InputError("metric", self.metric, nearest(self.metric, METRICS))
        choices = (("model", Model), ("clients", Clients), ("mean", Mean), ("round", Round))
        for name, literal in choices:
            value = getattr(self, name)
            numbered = name in ("clients", "round") and isinstance(value, int) and not isinstance(value, bool)
            if numbered and value < (1 if name == "round" else 0):
                raise InputError(name, value, "a round from 1, or a client from 0")
            if not numbered and value not in get_args(literal):
                raise InputError(name, value, nearest(str(value), get_args(literal)))
        if self.clients == "common" and self.model in ("personal", "fine-tuned", "newcomers"):
            raise InputError("clients", self.clients, f"'all': no client of a {self.model} model is at home there")
        if self.part not in METRICS[self.metric].parts:
            raise InputError("part", self.part, f"one of {METRICS[self.metric].parts} of {self.metric}")
        if self.metric in ("improvement", "rounds-speedup", "time-speedup") and not self.reference:
            raise InputError("reference", self.reference, f"what {self.metric} compares with")
        if self.metric == "rounds-to-target" and self.target is None and not self.reference:
            raise InputError("target", self.target, "an accuracy, or a reference whose accuracy it is")

    @property
    def unit(self) -> str:
        """The unit of the number, as a table prints it."""
        return METRICS[self.metric].unit

    @property
    def curve(self) -> bool:
        """Whether a cell holds a curve or a picture, not one number."""
        return METRICS[self.metric].curve


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number, or one curve, of a paper: what was trained, what was read off, and what the paper prints.

    `id` is unique within the exhibit. `row`, `column` and `panel` are where the paper has it, `label` is the paper's name of the
    method or variant, `x` is the position on a figure's axis where the axis is not the rounds. `published` is as printed, in the
    contract's unit; `relation` says whether the paper gives the number itself, about it, or a bound.
    """

    paper: str
    exhibit: str
    id: str
    setting: str
    method: str
    label: str
    variant: Mapping[str, Any]
    contract: Contract
    published: float | None = None
    spread: float | None = None
    relation: Relation = "="
    row: str = ""
    column: str = ""
    panel: str = ""
    x: float | None = None

    def experiment(self) -> dict[str, Any]:
        """Return the values of `Experiment.from_values`, the variant included."""
        return vary(values(self.paper, self.setting, self.method), self.variant)

    def reference(self) -> dict[str, Any] | None:
        """Return the values of the experiment that a relative number compares with, if there is one."""
        other = dict(self.contract.reference)
        if not other:
            return None
        if isinstance(other.get("method"), str):
            method = other.pop("method")
            own = {name: value for name, value in self.variant.items() if name != "method"}
            return vary(vary(values(self.paper, self.setting, method), own), other)
        return vary(self.experiment(), other)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A block of a table or one plot of a figure: its rows and columns in the paper's order and, of a plot, the axes."""

    id: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    x: str = ""
    y: str = ""
    series: str = ""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure. `seeds` and other values that the paper does not state are ours and named in `unstated`.

    `spread` says what ± is over: "seeds", "unstated", or "" where none is printed. `form` says how the paper shows it: table,
    curves, lines (over a swept value), heat-map, bars, bubbles, distribution. `like` names the exhibit whose arrangement
    it has: of another reading of the paper, or of another figure.
    """

    paper: str
    id: str
    kind: Kind
    title: str
    where: str
    form: str
    seeds: int
    spread: str
    note: str
    like: str
    unstated: tuple[str, ...]
    panels: tuple[Panel, ...]
    cells: tuple[Cell, ...] = field(repr=False)

    @property
    def name(self) -> str:
        """The name for the command: paper/exhibit."""
        return f"{self.paper}/{self.id}"

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of all panels, each once."""
        return tuple(dict.fromkeys(row for panel in self.panels for row in panel.rows))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of all panels, each once."""
        return tuple(dict.fromkeys(column for panel in self.panels for column in panel.columns))
