"""A score beside each client's own test: its name, its heading, what it means, and how it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.method import Method
from ..core.task import Task
from ..core.tree import Params
from ..data.samples import Part
from ..transport.messages import Kind, Reply


class Data(Protocol):
    """The data of a federation, as far as scores need it."""

    @property
    def train(self) -> Part:
        """All clients' training samples."""

    @property
    def test(self) -> Part:
        """All clients' test samples."""

    @property
    def common(self) -> Any:
        """(x, y) of the common test set, or None."""


class Finished(Protocol):
    """A run whose rounds are over. Clients are asked by orders, so that scores work on any transport."""

    @property
    def method(self) -> Method:
        """The method."""

    @property
    def training(self) -> Any:
        """The settings."""

    @property
    def engine(self) -> str:
        """The engine that trained the clients."""

    @property
    def task(self) -> Task:
        """The setting of local work, at the last round."""

    @property
    def clients(self) -> list[int]:
        """The clients that took part in the federation."""

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The clients that did not."""

    @property
    def data(self) -> Data:
        """The data."""

    @property
    def external_data(self) -> Any:
        """(x, y) of a source that no client had, or None."""

    def ask(self, kind: Kind, clients: Sequence[int], **options: Any) -> list[Reply]:
        """Send an order to each of the clients and return their replies."""

    def served(self, client: int) -> Params:
        """Return the model that serves a client: its personal one, else the generic one."""

    def generic_model(self) -> Params:
        """Return the generic model."""


@dataclass(frozen=True)
class Score:
    """One score: a number, or a few that are computed together.

    `columns` gives the heading of each number that has a column in tables; `explain` says, by the run's settings, what each
    number is. `wanted` says whether the settings ask for it once the rounds are over.
    """

    name: str
    columns: Mapping[str, str]
    explain: Callable[[Any], dict[str, str]]
    wanted: Callable[[Finished], bool] = lambda run: False
    compute: Callable[[Finished], dict[str, Any]] = lambda run: {}


SCORES: list[Score] = []  # in the order in which they are computed and shown


def register(score: Score) -> Score:
    """Add a score: tables, summaries and `Run.after` then have it."""
    SCORES.append(score)
    return score


def headings() -> dict[str, str]:
    """Return the heading of every number that has a column."""
    return {name: heading for score in SCORES for name, heading in score.columns.items()}
