"""Where results lie: a folder for each experiment and seed, by its settings and its data's content, so that exhibits share them.

    OUT/runs/DATA-METHOD-seedN-SETTINGS-CONTENT/   the run's folder (`run.journal`), from which a run in the middle goes on
        result.json                                written last, whole and with a checksum: only then is there a result

SETTINGS is a digest of all settings that are not defaults and of the scale. What cannot change a number is left out of it: where
the data lie, and how many processes train. CONTENT is a digest of the samples and labels themselves, so that other files under
the same name are other data, wherever they lie.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core import files, settings
from ..core.files import Damaged
from ..core.reading import Unreadable, field
from ..core.training import FurtherScores
from ..run.experiment import Experiment
from ..run.journal import Journal, environment
from ..run.prepare import named_device
from ..run.result import Run
from .scale import Scale

RUNS, RESULT = "runs", "result.json"
LEFT_OUT = ("data_root", "memory_map", "workers")
JOINING = ("newcomers", "join_epochs")  # settings of scores that change who trains
BESIDE = (
    "external",
    *(f.name for f in settings.fields_of(FurtherScores) if f.name not in JOINING),
)  # that change nothing
DEFAULTS: dict[str, Any] = {f.name: f.default for f in settings.fields_of(Experiment) if f.name in BESIDE}
FORMAT = 2  # 1: without the checksums of the data
ABSENT = "absent"  # in a folder's name, of data that cannot be read


@dataclass(frozen=True)
class Result:
    """What an experiment with one seed gave; with `failed`, why it gave nothing."""

    folder: str  # its name within the store
    seed: int
    data: Mapping[str, str] | None = None  # checksum of each source's samples
    partition: str = ""  # hash
    history: Sequence[dict[str, Any]] = ()
    after: dict[str, Any] | None = None  # scores after the federation
    cost: dict[str, Any] | None = None
    seconds: float = 0.0  # of the rounds, those before a resume included
    engine: str = ""
    date: str = ""
    command: str = ""
    environment: dict[str, Any] | None = None
    failed: str = ""

    def provenance(self) -> dict[str, Any]:
        """Return where the result comes from, without its numbers."""
        names = ("seed", "folder", "data", "partition", "date", "command", "engine", "environment", "seconds", "failed")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in ("", None)}


def values_of(experiment: Experiment) -> dict[str, Any]:
    """Return all settings of an experiment that a number can depend on, its device by name: one that need not be here."""
    method = {"id": experiment.method.id, **settings.values_of(experiment.method)}
    device = named_device(experiment.device)
    own = {name: value for name, value in settings.values_of(experiment).items() if name not in LEFT_OUT}
    return json.loads(json.dumps({**own, "device": str(device), "method": method}))  # type: ignore[no-any-return]


def digest(experiment: Experiment, scale: Scale) -> str:
    """Return the digest of an experiment: of the settings that are not defaults, so that a new setting changes none.

    What is scored beside is left out: a run with more scores has those of one with fewer.
    """
    values, defaults = values_of(experiment), values_of(Experiment())
    method = values.pop("method")
    given = {
        name: value
        for name, value in values.items()
        if (value != defaults[name] or name == "device") and name not in BESIDE
    }
    own = values_of(Experiment(method=type(experiment.method)()))["method"]
    given["method"] = {name: value for name, value in method.items() if name == "id" or value != own[name]}
    text = json.dumps({"settings": given, "scale": scale.share}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """The results in a folder. `checksum` gives a source's checksum by its name, None where it is not here."""

    def __init__(self, out: Path, checksum: Callable[[str], str | None]) -> None:
        self.out, self.checksum = out, checksum

    def name(self, experiment: Experiment, scale: Scale) -> str:
        """Return the name of a run's folder."""
        sums = self._checksums(experiment)
        content = ABSENT if None in sums.values() else _short(sums, 8)
        beside = {name: getattr(experiment, name) for name in BESIDE}
        asked = {name: value for name, value in beside.items() if value != DEFAULTS[name]}
        return "-".join([_base(experiment, scale), content, *([_short(asked, 6)] if asked else [])])

    def folder(self, name: str) -> Path:
        """Return a run's folder."""
        return self.out / RUNS / name

    def read(self, experiment: Experiment, scale: Scale) -> Result | None:
        """Return the result of an experiment, or of one with more scores; None where there is none that is whole.

        Where the data are not here, so that nobody can say which were meant, the results must all be of the same.
        """
        near = {path.name for path in (self.out / RUNS).glob(f"{glob.escape(_base(experiment, scale))}-*")}
        if not near:  # nothing to compare the data with, so they need not be read
            return None
        own, sums = self.name(experiment, scale), self._checksums(experiment)
        order = [*([own] if own in near else []), *sorted(near - {own})]
        found = [result for name in order if (result := self._read(name, experiment, scale, sums)) is not None]
        unsure = [source for source, known in sums.items() if known is None]
        meant = {tuple((result.data or {}).get(source) for source in unsure) for result in found}
        return found[0] if len(meant) == 1 else None

    def _checksums(self, experiment: Experiment) -> dict[str, str | None]:
        """Return the checksums of an experiment's sources."""
        return {source: self.checksum(source) for source in (experiment.data, experiment.external) if source}

    def _read(self, name: str, experiment: Experiment, scale: Scale, sums: Mapping[str, str | None]) -> Result | None:
        """Return the result in a folder; None where it is none of this experiment on these data."""
        folder = self.folder(name)
        try:
            record = files.unseal(folder / RESULT)
            if record["format"] != FORMAT or record["scale"] != scale.share:
                return None
            if not _same(record["settings"], values_of(experiment)):
                return None
            if any(record["data"][source] != known for source, known in sums.items() if known is not None):
                return None
            known = {f.name for f in fields(Result)} - {"history", "folder"}
            given = {name: record[name] for name in known & record.keys()}
            if record.get("failed"):
                return Result(folder=name, **given)
            metrics = Journal(folder).metrics
            if files.digest_of(metrics) != field(record, "metrics", str):
                return None
            return Result(folder=name, history=Journal(folder).history(), **given)
        except (Damaged, Unreadable, KeyError, TypeError, OSError):
            return None

    def write(self, experiment: Experiment, scale: Scale, run: Run, partition: str, command: str) -> None:
        """Write the result of a run that is over; its folder holds the records."""
        name = self.name(experiment, scale)
        journal = Journal(self.folder(name))
        result = Result(
            folder=name,
            seed=experiment.seed,
            data=self._known(experiment),
            partition=partition,
            after=run.after,
            cost=run.cost.to_dict(),
            seconds=float(sum(record["seconds"] for record in run.history)),
            engine=run.engine,
            date=today(),
            command=command,
            environment=environment(named_device(experiment.device)),
        )
        self._write(experiment, scale, result, {"metrics": files.digest_of(journal.metrics)})

    def forget_state(self, name: str) -> None:
        """Remove the checkpoints of a run that is over: they may take gigabytes, and no cell is read from them."""
        Journal(self.folder(name)).checkpoints.prune(())

    def fail(self, experiment: Experiment, scale: Scale, reason: str, command: str) -> None:
        """Write that an experiment cannot be run to its end, and why."""
        name = self.name(experiment, scale)
        result = Result(name, experiment.seed, self._known(experiment), date=today(), command=command, failed=reason)
        self._write(experiment, scale, result, {})

    def _known(self, experiment: Experiment) -> dict[str, str]:
        """Return the checksums of an experiment's sources, which were read to run it."""
        return {source: known or "" for source, known in self._checksums(experiment).items()}

    def _write(self, experiment: Experiment, scale: Scale, result: Result, more: dict[str, Any]) -> None:
        values = {name: value for name, value in asdict(result).items() if name not in ("history", "folder")}
        about = {"format": FORMAT, "settings": values_of(experiment), "scale": scale.share, **more}
        files.write(self.folder(result.folder) / RESULT, files.seal({**about, **values}, indent=1))


def today() -> str:
    """Return the date and time, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether settings that were kept are those of now; what only one of the two has is a setting of another version."""
    one, other = _flat(before), _flat(now)
    return all(
        one[name] == other[name] or (name in BESIDE and other[name] == DEFAULTS[name])
        for name in one.keys() & other.keys()
    )


def _base(experiment: Experiment, scale: Scale) -> str:
    """Return how the names of all folders with results of an experiment begin, whatever its data hold."""
    data = re.sub(r"[^a-z0-9.]+", "-", Path(experiment.data).name.lower()).strip("-") or "data"
    return f"{data[:40]}-{experiment.method.id}-seed{experiment.seed}-{digest(experiment, scale)[:12]}"


def _short(values: Mapping[str, Any], digits: int) -> str:
    """Return so many digits of a digest of some values."""
    return files.digest(json.dumps(values, sort_keys=True).encode())[:digits]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, **{f"method.{name}": value for name, value in values["method"].items()}, "method": None}
