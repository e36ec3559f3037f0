"""What a run gave: its history, its models, and scores that can be asked for afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from .. import scores
from ..core import settings, tree
from ..core.errors import InputError, NoSamples, Shown, TrainingError, nearest
from ..core.method import Method
from ..core.task import Task
from ..core.tree import Params, Tree
from ..data import Dataset
from ..data.outline import Outline
from ..edge.data_manager import DataManager
from ..engine.kept import initial_memory
from ..engine.trainer import Trainer
from ..nn import lora
from ..server.coordinator import Coordinator, Record
from ..transport.messages import Kind, Reply
from . import accounting, frame
from .driver import Driver
from .evaluate import Evaluation
from .experiment import Training
from .prepare import PYTHON, Simulation

_tables: list[Callable[[Sequence[Run]], str]] = []


def register_table(render: Callable[[Sequence[Run]], str]) -> Callable[[Sequence[Run]], str]:
    """Make `render` what `Run.table` prints with: results do not import reports, which are made of them."""
    _tables.append(render)
    return render


Parts: TypeAlias = tuple[Simulation, Coordinator, Driver]


class Source(Protocol):
    """What a run's folder holds (see `load`)."""

    @property
    def has_data(self) -> bool:
        """Whether the data have been read."""

    def open(self) -> Parts:
        """Return the run as it was after its last checkpoint, without its data unless these were asked for before."""

    def read_data(self) -> Parts:
        """Read the run's data as well."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a run gave. Whatever needs a client's memory is asked of the client by an order, on any transport."""

    _simulation: Simulation | None  # None: made without its data (`without_data`)
    _coordinator: Coordinator | None
    _driver: Driver | None
    method: Method
    training: Training
    engine: str
    history: list[Record]  # one record a round
    seconds: float
    task: Task  # the setting of local work, at the round whose models are kept: the last, or with patience the best
    newcomers: tuple[int, ...] = ()  # clients that did not take part in training
    attackers: tuple[int, ...] = ()  # simulated, which no score counts
    after: dict[str, Any] = dataclasses.field(default_factory=dict)  # scores after the federation that were asked for
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of its data that tell it from others
    outline: Outline | None = None  # the form of its data, with the names of clients and classes
    model: str = ""  # by name, where it has one
    folder: Path | None = None  # that it was loaded from
    _cost: list[accounting.Cost] = dataclasses.field(default_factory=list)  # once it was asked for
    _source: Source | None = None  # of a run that was loaded: what its folder holds

    @classmethod
    def of(cls, simulation: Simulation, coordinator: Coordinator, driver: Driver, engine: str, seconds: float) -> Run:
        """Return the result of a coordinator whose rounds are over."""
        task = dataclasses.replace(coordinator.task, round=coordinator.best_round or coordinator.task.rounds)
        history, newcomers = coordinator.state.history, simulation.newcomers
        attackers = () if simulation.attack is None else tuple(sorted(simulation.attack.clients))
        return cls(
            simulation, coordinator, driver, simulation.method, simulation.training, engine, history, seconds, task, newcomers,
            attackers, outline=simulation.outline,
            model=PYTHON if simulation.experiment is None else simulation.experiment.model,
        )  # fmt: skip

    @property
    def trainer(self) -> Trainer:
        """What trains and scores clients in this process, with their data."""
        return self._with_data()[0].trainer

    @property
    def data(self) -> DataManager:
        """The clients' data."""
        return self._with_data()[0].data

    @property
    def server(self) -> Tree:
        """The server's state after the last round."""
        return self._loaded()[1].state.server

    @property
    def external_data(self) -> Any:
        """Samples and labels of a source that no client had, where the run has one."""
        return self._with_data()[0].external

    @property
    def clients(self) -> list[int]:
        """The clients that took part in the federation: all but the newcomers and simulated attackers."""
        others = {*self.newcomers, *self.attackers}
        return [k for k in range(self.task.clients + len(self.newcomers)) if k not in others]

    @property
    def rejected(self) -> dict[int, list[str]]:
        """Why replies of clients were refused, round by round."""
        causes: dict[int, list[str]] = {}
        for record in self.history:
            for client, reason in record.get("rejected", {}).items():
                causes.setdefault(int(client), []).append(reason)
        return dict(sorted(causes.items()))

    @property
    def cost(self) -> accounting.Cost:
        """What a round costs a participant: steps, FLOPs (counted when first asked for), bytes; and a round's seconds."""
        if not self._cost:
            self._cost.append(accounting.cost(self))
        return self._cost[0]

    def without_data(self) -> Run:
        """Return the same result, its cost counted, without the clients and their data."""
        _ = self.cost
        return dataclasses.replace(self, _simulation=None, _coordinator=None, _driver=None, _source=None)

    @property
    def has_data(self) -> bool:
        """Whether the clients and their data are still loaded."""
        return self._simulation is not None or (self._source is not None and self._source.has_data)

    def ask(self, kind: Kind, clients: Sequence[int], **options: Any) -> list[Reply]:
        """Send an order to each of the clients, with what they would download now; return the replies that can be."""
        coordinator, replies = self._asked(kind, clients, **options)
        return coordinator.sound(replies)

    def served(self, client: int) -> Params:
        """Return the model that serves a client, by the names of the model's state: its personal one, else the generic one."""
        if "personal" not in self.method.scores:
            return self.generic_model()
        return self._one("model", client).up["params"]  # type: ignore[no-any-return]

    def generic_model(self) -> Params:
        """Return the generic model, by the names of the model's state."""
        return self.method.generic(self.task, self.server)

    def memory(self, client: int) -> Tree:
        """Return what a client keeps between rounds, as far as it is decided which of its replies count."""
        reply = self._one("state", client, down={})
        memory = reply.up.get("memory", initial_memory(self.method, self.task, self._loaded()[0].initial))
        return tree.to({**memory, **reply.up.get("undecided", {})}, self.task.net.device)

    def personal(self, client: int | str, merged: bool = False) -> Params:
        """Return the own model of a client, by its number or name, as a whole state dict.

        For a method without personal models that is the generic one. With `merged`, LoRA's adapters are added into the weights
        that they adapt, and it is a state dict of the model without adapters.
        """
        return self.state_dict(self.served(self.client(client)), merged)

    def client(self, client: int | str) -> int:
        """Return the number of a client, which is given by its number or its name; refuse one that there is not."""
        last = self.task.clients + len(self.newcomers) - 1
        names = () if self.outline is None else self.outline.names
        if isinstance(client, str) and client in names:
            return names.index(client)
        try:
            number = int(client)
        except ValueError:
            number = -1
        if not 0 <= number <= last:
            named = f", or a name: {nearest(client, names)}" if isinstance(client, str) and names else ""
            raise InputError("client", client, f"a number from 0 to {last}{named}")
        return number

    def generic(self, merged: bool = False) -> Params:
        """Return the model for everybody as a state dict (for `Local`, where nobody trains one: the initial weights).

        `merged` as in `personal`.
        """
        return self.state_dict(self.generic_model(), merged)

    def state_dict(self, params: Params, merged: bool = False) -> Params:
        """Return a model, given by what of it trains, as a whole state dict on the CPU."""
        state = self.task.net.export(params)
        return lora.merged(self.task.net.module, state) if merged else state

    def score(self, **contract: Any) -> float:
        """Return one number by the evaluation contract: `model`, `clients`, `mean`, `round`, `metric` (see `Evaluation`)."""
        return settings.build(Evaluation, contract).of(self._records())

    def rounds_to(self, target: float, contract: Evaluation | None = None) -> int | None:
        """Return the first scored round whose number, by the contract, is at least `target`, of errors at most.

        None where none is: the target was never reached. The contract's `round` has no part in it.
        """
        if contract is not None and not isinstance(contract, Evaluation):
            raise InputError(
                "contract", Shown(repr(contract)), "a fedstill.Evaluation, such as Evaluation(mean='sample')"
            )
        return (contract or Evaluation()).rounds_to(self._records(), target)

    @property
    def stopped(self) -> bool:
        """Whether the run has ended early, after so many rounds without a better score (`patience`)."""
        return bool(self.history) and bool(self.history[-1].get("stopped"))

    @property
    def kept(self) -> list[Record]:
        """The records up to the round whose models are kept: all, or with patience those up to the best round."""
        return self.history[: self.task.round] if self.training.patience else self.history

    def _records(self) -> list[Record]:
        """Return the records that count, the last one with the scores that were taken after the federation."""
        return [*self.kept[:-1], {**self.kept[-1], **self.after}] if self.kept else []

    def new(self, on: Literal["clients", "common"] = "clients") -> float:
        """Return the accuracy where a sample's owner is unknown: all models vote, on clients' tests or the common set."""
        return scores.new(self, on)

    def external(self, data: Dataset | Sequence[Any], model: Literal["ensemble", "generic"] = "ensemble") -> float:
        """Return the accuracy on a source that no client had, a `Dataset` or (x, y): of all models' vote, or the generic one."""
        return scores.on_external(self, self._with_data()[0].samples.read(data), model)

    def averaged(
        self, on: Literal["clients", "common"] = "clients", mean: Literal["weighted", "uniform"] = "weighted"
    ) -> float:
        """Return the accuracy of the mean of the personal weights: a generic score for methods without a generic model."""
        return scores.averaged(self, on, mean)

    def fine_tuned(
        self, epochs: int = 10, part: Literal["head", "all"] = "head", mean: Literal["client", "sample"] = "client"
    ) -> float:
        """Return the accuracy on their own tests after each client has trained on for `epochs`; the run does not change."""
        results = scores.fine_tuned(self, epochs, part)
        return float(results["fine_tuned" if mean == "client" else "fine_tuned_sample"])

    def joined(self, epochs: int = 5) -> tuple[float, float]:
        """Return the newcomers' accuracy, weighted by their training samples: (of the method's personal models, after `epochs` of
        training)."""
        results = scores.joined(self, epochs)
        return results["newcomers_before"], results["newcomers_after"]

    def backdoor(self, target: int = 0) -> dict[str, float]:
        """Return how often the personal and the generic models give class `target` to samples with a backdoor's trigger."""
        return scores.backdoor(self, target)

    def to_frame(self, clients: bool = False) -> Any:
        """Return the records as a pandas frame, a row for each round; with `clients`, one for each scored round and client."""
        try:
            import pandas
        except ImportError:
            raise InputError(
                "to_frame", Shown("no pandas"), "called where it is installed: pip install pandas"
            ) from None
        rows = frame.by_client(self.history, self.outline) if clients else frame.by_round(self.history)
        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        known = [f"{len(self.history)} rounds", f"{len(self.clients)} clients"]
        with contextlib.suppress(InputError):
            known += [f"{Evaluation().measure(self.history).words(self.score())} ({Evaluation()})"]
        where = "" if self.folder is None else f" in {self.folder}"
        return f"Run({self.method.id or type(self.method).__name__}{where}: {', '.join(known)})"

    def _repr_html_(self) -> str:
        """Return the table of results, for a notebook."""
        return f"<pre>{html.escape(self.table() if self.history else repr(self))}</pre>"

    def table(self) -> str:
        """Return the result as text, with the settings that it belongs to."""
        if not _tables:  # where only parts of the library were imported
            importlib.import_module(f"{__name__.partition('.')[0]}.api")
        return _tables[-1]([self])

    def _one(self, kind: Kind, client: int, **options: Any) -> Reply:
        """Return the reply of one client."""
        coordinator, replies = self._asked(kind, [client], **options)
        reason = coordinator.unsound(replies[0]) or replies[0].refusal if replies else ""
        if not replies or reason:
            why = f": {reason}" if reason else ""
            raise TrainingError(f"client {client} did not answer an order of the kind {kind!r}{why}")
        return replies[0]

    def _asked(self, kind: Kind, clients: Sequence[int], **options: Any) -> tuple[Coordinator, list[Reply]]:
        """Send orders; where clients of a run that was loaded cannot answer without their samples, read these first."""
        try:
            return self._send(self._loaded(), kind, clients, **options)
        except NoSamples:
            if self._source is None:
                raise
            return self._send(self._source.read_data(), kind, clients, **options)

    def _send(
        self, parts: Parts, kind: Kind, clients: Sequence[int], **options: Any
    ) -> tuple[Coordinator, list[Reply]]:
        _, coordinator, driver = parts
        orders = [coordinator.order(kind, self.task, k, **options) for k in clients]
        return coordinator, driver.ask(orders, coordinator.run)

    def _with_data(self) -> Parts:
        """Return simulation, coordinator and driver with the data, which are read where the run was loaded without them."""
        return self._loaded() if self._source is None else self._source.read_data()

    def _loaded(self) -> Parts:
        """Return the simulation, coordinator and driver; fail if the run was made without its data."""
        if self._source is not None:
            return self._source.open()
        if self._simulation is None or self._coordinator is None or self._driver is None:
            raise RuntimeError("this run was made without its data")
        return self._simulation, self._coordinator, self._driver
