"""The run folder: all results of a run, written so that a kill at any moment loses at most the last rounds.

    experiment.toml    all settings, defaults included              environment.json   versions and device
    partition.json     who has which samples, with its hash         metrics.jsonl      one record a round
    data.json          shape of a sample, names of clients and      metrics.csv        its plain numbers as a table, once the run
                       classes, how samples were normalised                            has ended or stopped
    timeline.jsonl     with simulated time: what each client did and when, one line a round
    scores.json        scores after the federation                  failed.json        why the run could not go on
    answers.json       which test samples each client's model gets right after the last round
    choices.json       measured choices (kernels, clients at once); a resumed run uses them again
    constants.safetensors
                       frozen weights and whatever else training never changes of the model, once for all checkpoints
    checkpoints/       the newest two states (safetensors, with checksums; many clients in several files); `fedstill resume
                       FOLDER` continues from the newest

Files are replaced atomically: written to a temporary name, flushed to the disk, renamed. No file is a pickle. environment.json
has the checksums of experiment.toml, partition.json and the constants, and every checkpoint those of the records up to its
round: a run goes on with the settings and the history that it had, or says in one line why it does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import files
from ..core.errors import InputError, Shown
from ..core.files import Damaged, write
from ..core.reading import Missing, Unreadable, field, open_regular, parse_json, read_json
from ..core.tree import Params, Tree
from ..core.version import __version__
from ..data.outline import Outline
from ..engine.stage import say
from ..nn.constants import Constants
from ..nn.kernels.autotune import Choices
from .checkpoint import Bound, Checkpoint, Checkpoints, CheckpointWriter
from .experiment import FORMAT
from .frame import as_csv
from .lock import CHECKPOINTS, FolderLock, check_free

FAILED, SCORES, CHOICES = "failed.json", "scores.json", "choices.json"
EXPERIMENT, PARTITION, ENVIRONMENT = "experiment.toml", "partition.json", "environment.json"
DATA, TABLE, CONSTANTS = "data.json", "metrics.csv", "constants.safetensors"


@dataclass(frozen=True)
class Lines:
    """The records of a file, one for each round from the first on, as far as they are as they should be."""

    raw: bytes = b""
    records: Sequence[dict[str, Any]] = ()
    ends: Sequence[int] = (0,)  # the number of bytes before the first record, and up to the end of each
    problem: str = ""  # what ends them before the end of the file
    torn: bool = False  # whether that is only the last line, cut short by a kill

    @classmethod
    def read(cls, path: Path, every: bool = True) -> Lines:
        """Return the records of a file; none where it does not exist. Without `every`, rounds may be left out."""
        try:
            with open_regular(path) as file:
                raw = file.read()
        except Missing:
            return cls()
        except Unreadable as error:
            return cls(problem=f"{path.name} cannot be read (it should be {error})")
        except OSError as error:
            return cls(problem=f"{path.name} cannot be read ({error.strerror})")
        records: list[dict[str, Any]] = []
        ends, before = [0], 0
        while ends[-1] < len(raw):
            end = raw.find(b"\n", ends[-1]) + 1
            last = end in (0, len(raw))
            try:
                record = parse_json(raw[ends[-1] : end]) if end else None
                round = record.get("round") if isinstance(record, dict) else None
                if (
                    not isinstance(record, dict)
                    or type(round) is not int
                    or not (round == before + 1 if every else round > before)
                ):
                    raise Unreadable(f"the record of round {before + 1}")
            except Unreadable as error:
                problem = f"the last line of {path.name} is cut short"
                if not last:
                    problem = f"line {len(records) + 1} of {path.name} is damaged (it should be {error})"
                return cls(raw, records, ends, problem, torn=last)
            records.append(record)
            ends.append(end)
            before = round
        return cls(raw, records, ends)

    def upto(self, round: int) -> Lines:
        """Return the lines of the rounds up to this one."""
        count = sum(record["round"] <= round for record in self.records)
        return Lines(self.raw[: self.ends[count]], self.records[:count], self.ends[: count + 1])


@dataclass(frozen=True)
class Survey:
    """What a folder holds for its run to go on with."""

    metrics: Lines
    timeline: Lines
    whole: dict[int, Checkpoint]  # by round, ascending
    damaged: dict[int, str]  # by round, ascending, what is wrong

    def problems(self, after: int = 0) -> list[str]:
        """Return what is wrong with all that is of later rounds."""
        found = [self.damaged[round] for round in reversed(self.damaged) if round > after]
        found += [lines.problem for lines in (self.metrics, self.timeline) if lines.problem]
        return found


class Journal:
    """Writes and reads one run folder; `begin` creates it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metrics, self.timeline = self.folder / "metrics.jsonl", self.folder / "timeline.jsonl"
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS)
        self._records = {file.stem: hashlib.sha256() for file in (self.metrics, self.timeline)}  # of what is written
        self._lock: FolderLock | None = None

    def begin(
        self,
        experiment: str,
        partition: Mapping[str, Any],
        device: torch.device,
        threads: int = 0,
        engine: str = "",
        outline: Outline | None = None,
        constants: Constants | None = None,
    ) -> None:
        """Create the folder, which must be new or empty, and write the files that determine the run.

        `threads` is how many clients train on (0: as many as torch is set to), on which last bits may depend.
        """
        from safetensors.torch import save

        fixed = None if constants is None or not constants.tensors else constants
        self.hold()
        check_free(self.folder)
        division = json.dumps(partition)
        about = {
            **environment(device, threads),
            **({"engine": engine} if engine else {}),
            **({} if fixed is None else {"constants": fixed.digest()}),
            "partition": files.digest(division.encode()),
            "experiments": [{"after": 0, "sha256": files.digest(experiment.encode())}],
        }
        contents = {
            PARTITION: division.encode(),
            **({} if outline is None else {DATA: files.seal(outline.to_dict())}),
            **({} if fixed is None else {CONSTANTS: save(fixed.copies())}),
            ENVIRONMENT: files.seal(about, indent=2),
            EXPERIMENT: experiment.encode(),  # last: a folder without it holds no run yet
        }
        try:
            files.make_folder(self.checkpoints.folder)
            for name, data in contents.items():
                write(self.folder / name, data)
        except BaseException:
            with contextlib.suppress(OSError):
                for name in reversed(contents):
                    (self.folder / name).unlink(missing_ok=True)
                self.checkpoints.folder.rmdir()
            raise

    def hold(self) -> None:
        """Take the folder's lock, where it is not held yet; refuse a folder in which another process is at work."""
        if self._lock is None:
            self._lock = FolderLock(self.folder)

    def release(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Take the folder's lock, and keep it where nothing fails within."""
        self.hold()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def check_settings(self) -> None:
        """Refuse a folder whose settings or division are not those with which the run began, or which a flag has changed."""
        problem = self._changed()
        if not problem:
            return
        again = f"'fedstill run {self.folder / EXPERIMENT} --out ANOTHER' begins a run with what it says now"
        right = f"a folder as fedstill wrote it ({problem}); only a flag such as --rounds changes a run, and {again}"
        raise InputError("folder", str(self.folder), right)

    def _changed(self) -> str:
        """Return which file that determines the run is not as it was written; "" where all are."""
        name = ENVIRONMENT
        try:
            about = files.unseal(self.folder / name)
            known = {EXPERIMENT: [entry["sha256"] for entry in about["experiments"]], PARTITION: [about["partition"]]}
            for name, digests in known.items():
                if files.digest_of(self.folder / name) not in digests:
                    return f"{name} has been changed or damaged since the run began"
        except (Damaged, KeyError, TypeError) as error:
            return f"{name}: {error}" if isinstance(error, Damaged) else f"{name} is none of this version"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return ""

    def note_changes(self, device: torch.device) -> None:
        """Say where this process differs from the one that began the run in what the last bits of results depend on."""
        about, now = files.unseal(self.folder / ENVIRONMENT), environment(device)
        names = ("fedstill", "torch", "numpy", "device")
        changed = [f"{name} {about.get(name)}, now {now[name]}" for name in names if about.get(name) != now[name]]
        if changed:
            say(
                f"{self.folder}: it began with {'; '.join(changed)}: last bits may differ from those of a run without a stop"
            )

    def check_constants(self, constants: Constants) -> None:
        """Refuse to continue with a model whose frozen weights are others than when the run began."""
        before, now = str(files.unseal(self.folder / ENVIRONMENT).get("constants", "")), constants.digest()
        if before != now:
            right = f"with the frozen weights that it began with ({before[:12]}), which are in {CONSTANTS}"
            right = right if before else "with nothing frozen, as it began"
            raise InputError("model", Shown(now[:12] or "nothing frozen"), right)

    def constants(self) -> Params:
        """Return the frozen weights with which the run began, for a model that has other ones; none where it has none."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        if not files.unseal(self.folder / ENVIRONMENT).get("constants"):
            return {}
        try:
            return load((self.folder / CONSTANTS).read_bytes())
        except (OSError, SafetensorError) as error:
            raise InputError("folder", str(self.folder), f"one whose {CONSTANTS} is whole ({error})") from None

    def outline(self) -> Outline | None:
        """Return the form of the run's data; None where that is not known, or not as it was written."""
        try:
            return Outline.from_dict(files.unseal(self.folder / DATA))
        except (Damaged, Unreadable):
            return None

    def check_partition(self, partition: Mapping[str, Any]) -> None:
        """Refuse to continue if the data is divided differently than at the start of the run."""
        try:
            before = read_json(self.folder / PARTITION, limit=1 << 30)
        except Unreadable as error:
            raise InputError("folder", str(self.folder), f"one whose {PARTITION} is {error}") from None
        now = json.loads(json.dumps(partition))
        left = {
            "indices",
            *(name for name in ("names", "labels") if name not in before),
        }  # names are newer than the format
        changed = [name for name in {**before, **now} if name not in left and before.get(name) != now.get(name)]
        if changed:
            name = changed[0]
            right = f"{before.get(name)}, as when the run began: the data or its division has changed"
            raise InputError(f"partition {name}", now.get(name), right)

    def record(self, record: Mapping[str, Any]) -> None:
        """Append a round's record; its `timeline`, if any, goes to a separate file."""
        if "timeline" in record:
            self._append(self.timeline, record["timeline"])
        self._append(self.metrics, {name: value for name, value in record.items() if name != "timeline"})

    def _append(self, file: Path, record: Mapping[str, Any]) -> None:
        """Append a record as a line of JSON, and take it into the checksum of its file."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        files.append(file, line)
        self._records[file.stem].update(line)

    def write_choices(self, choices: Choices) -> None:
        """Write the measured choices if they have changed."""
        entries = choices.to_dict()
        if entries and entries != self.choices():
            write(self.folder / CHOICES, files.seal(entries, indent=2))

    def choices(self) -> dict[str, Any]:
        """Return the choices measured before the run was interrupted; none where the file is missing or damaged."""
        try:
            return files.unseal(self.folder / CHOICES)
        except Damaged:
            return {}

    def write_table(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write the plain numbers of all rounds as CSV, beside metrics.jsonl."""
        write(self.folder / TABLE, as_csv(history).encode())

    def history(self) -> list[dict[str, Any]]:
        """Return the records, as far as they are as they should be."""
        return list(Lines.read(self.metrics).records)

    def timelines(self) -> list[dict[str, Any]]:
        """Return the timelines, one for each round; none without simulated time."""
        return list(Lines.read(self.timeline, every=False).records)

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / EXPERIMENT).is_file()

    def amend(self, experiment: str, after: int) -> None:
        """Replace the run's settings by those with which it goes on after a round, and keep a record of that."""
        about = files.unseal(self.folder / ENVIRONMENT)
        entry = {"after": after, "sha256": files.digest(experiment.encode())}
        if about["experiments"][-1] != entry:  # a kill may come before the second file
            about["experiments"].append(entry)
        write(self.folder / ENVIRONMENT, files.seal(about, indent=2))
        write(self.folder / EXPERIMENT, experiment.encode())

    def fail(self, reason: str) -> None:
        """Note why the run cannot go on."""
        write(self.folder / FAILED, (json.dumps({"reason": reason}) + "\n").encode())

    def failure(self) -> str:
        """Return why the run could not go on; "" where it has not failed."""
        try:
            return field(read_json(self.folder / FAILED), "reason", str)
        except Unreadable:
            return ""

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        """Write the scores after the federation, where any were asked for."""
        if scores:
            write(self.folder / SCORES, (json.dumps(scores, indent=2) + "\n").encode())

    def scores(self) -> dict[str, Any] | None:
        """Return the scores that were written; None where there are none."""
        try:
            return read_json(self.folder / SCORES)
        except Unreadable:
            return None

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def writer(self, round: int, state: Tree, choices: Choices | None = None) -> CheckpointWriter:
        """Return what writes the checkpoint of a round, whose record is written."""
        records = {name: written.hexdigest() for name, written in self._records.items()}
        chosen = {} if choices is None else choices.to_dict()
        return CheckpointWriter(self.checkpoints, round, state, Bound(self._run(), records), chosen)

    def save(self, round: int, state: Tree, clients: Iterable[tuple[int, Tree]] = ()) -> None:
        """Write a checkpoint: the state after a round and the clients' states, one after another."""
        writer = self.writer(round, state)
        for client, client_state in clients:
            writer.add(client, client_state)
        writer.close()

    def survey(self, device: torch.device) -> Survey:
        """Look at all that a run could go on with."""
        metrics, timeline = Lines.read(self.metrics), Lines.read(self.timeline, every=False)
        whole: dict[int, Checkpoint] = {}
        damaged = {round: f"the checkpoint of round {round} is unfinished" for round in self.checkpoints.unfinished()}
        run = self._run()
        for round in self.checkpoints.rounds():
            if round > len(metrics.records):
                damaged[round] = f"the checkpoint of round {round} has no record of its round"
                continue
            both = {"metrics": metrics, "timeline": timeline}
            records = {name: files.digest(lines.upto(round).raw) for name, lines in both.items()}
            try:
                whole[round] = self.checkpoints.load(round, Bound(run, records), device)
            except Damaged as error:
                damaged[round] = str(error)
        return Survey(metrics, timeline, whole, dict(sorted(damaged.items())))

    def load(self, device: torch.device) -> Checkpoint | None:
        """Return the newest whole checkpoint; None without one."""
        whole = self.survey(device).whole
        return whole[max(whole)] if whole else None

    def choose(self, survey: Survey, every: int = 10, at: int | None = None) -> Checkpoint | None:
        """Return the newest whole checkpoint, or that of round `at`; None where the run begins again, before its first.

        Say what is damaged or missing, and refuse to begin again where a checkpoint there must have been is lost.
        """
        newest = max(survey.whole, default=0) if at is None else at
        problems = survey.problems(after=newest)
        if newest:
            if problems:
                say(f"{self.folder}: {'; '.join(problems)}: the run goes on after round {newest}")
            return survey.whole[newest]
        done = len(survey.metrics.records)
        lost = [f"it has {done} records and no checkpoint"] if done > every else []
        if survey.metrics.problem and not survey.metrics.torn:
            lost.append(survey.metrics.problem)
        lost += [survey.damaged[round] for round in reversed(survey.damaged) if round in self.checkpoints.rounds()]
        if lost:
            right = f"one with a checkpoint to go on from ({'; '.join(dict.fromkeys(lost))})"
            again = "nothing was changed; delete it to have it run again from round 1"
            raise InputError("folder", str(self.folder), f"{right}; {again}")
        if done or problems:
            say(f"{self.folder}: stopped before its first checkpoint: it begins again at round 1")
        return None

    def rewind(self, survey: Survey, round: int) -> list[dict[str, Any]]:
        """Drop the records after a round; return the others, with their timelines."""
        metrics, timeline = survey.metrics.upto(round), survey.timeline.upto(round)
        both = [(self.metrics, survey.metrics, metrics), (self.timeline, survey.timeline, timeline)]
        for file, before, lines in both:
            if before.raw != lines.raw:
                write(file, lines.raw)
            self._records[file.stem] = hashlib.sha256(lines.raw)
        self.checkpoints.kept = [kept for kept in survey.whole if kept <= round]
        if not round:
            self.checkpoints.prune([])
        (self.folder / FAILED).unlink(missing_ok=True)
        for left in (*self.folder.glob(f"*{files.PART}"), *self.checkpoints.folder.glob(f"*{files.PART}")):
            left.unlink(missing_ok=True)
        for left in self.folder.glob("fedstill-memories-*"):
            shutil.rmtree(left, ignore_errors=True)
        by_round = {line["round"]: {"timeline": line} for line in timeline.records}
        return [{**record, **by_round.get(record["round"], {})} for record in metrics.records]

    def _run(self) -> str:
        """Return the checksum of what the run began with."""
        try:
            about = files.unseal(self.folder / ENVIRONMENT)
            return files.digest(f"{about['experiments'][0]['sha256']} {about['partition']}".encode())
        except (Damaged, KeyError, TypeError, IndexError):
            return ""  # refused by `check_settings`


def environment(device: torch.device, threads: int = 0) -> dict[str, Any]:
    """Return versions and device, which may make numbers differ in the last bits."""
    return {
        "fedstill": __version__,
        "format": FORMAT,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": threads or torch.get_num_threads(),
    }
