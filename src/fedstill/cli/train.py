"""The commands that train: run, compare, sweep, demo, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import models
from ..core import own
from ..core.errors import InputError, Shown, nearest
from ..methods import METHODS, get, register
from ..models import weights
from ..report.text import Facts
from ..run import prepare, simulation
from ..run.experiment import Experiment, check_format
from ..run.journal import Journal
from ..run.lock import LOCK, FolderLock
from ..run.session import Transports
from ..run.track import TRACKERS
from . import carrier, flags, folders, saved
from . import job as job_
from .attacked import plan_attacked
from .dated import NOWHERE, reserved
from .execute import execute, stoppable
from .job import Job, every_method, plan
from .live import watch
from .screen import results, say
from .sweep import plan_sweep

DEFAULT_METHODS = ("local", "fedavg", "fedrep", "pfedsd")  # what the demo compares, and a comparison without names


OFTEN = (  # the experiment's flags that `--help` shows; `--help-all` shows all
    "data", "clients", "partition", "model", "rounds", "participation", "seed", "epochs", "batch_size", "lr", "device",
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """A command's help text, and the methods whose flags it takes."""

    command: str
    words: str
    about: str
    examples: tuple[str, ...]
    out: str = "a new one under runs/, named by date and method"
    own: tuple[str, ...] = ()  # the methods whose flags it takes; empty: all, and those of one's own

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods whose flags it takes."""
        return self.own or tuple(METHODS)

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]] | None:
        """Return the flags and words of a command line, or print help (of the methods named in it) and return None."""
        own.allow()
        argv = self._with_own(argv)
        flag_values, words = self.parser(self.methods).read(argv)
        named = tuple(word for word in words if word in self.methods)
        if "help_all" in flag_values:
            self.parser(named or self.methods).print_help()
            return None
        if "help" in flag_values:
            print(self.brief(named))
            return None
        if flag_values.pop("no_out", False):
            if "out" in flag_values:
                raise InputError("--no-out", Shown("given"), f"left out: --out is {flag_values['out']}")
            flag_values["out"] = NOWHERE
        with flags.named(flag_values):
            for name, settle in (("model", models.settled), ("weights", weights.settled)):
                if flag_values.get(name):
                    flag_values[name] = settle(flag_values[name])
        if "metrics" in flag_values:
            flag_values["metrics"] = [_kept(name) for words in flag_values["metrics"] for name in words.split(",")]
        return flag_values, words

    def _with_own(self, argv: Sequence[str]) -> list[str]:
        """Return the words with methods of one's own by their ids; they are registered, so that their fields are flags."""
        if self.own or not any(map(own.is_reference, argv)):
            return list(argv)
        _, words = self.parser(self.methods).parse_known_args(list(argv))
        ids = {}
        for word in filter(own.is_reference, words):
            ids[word] = register(word).id
        return [ids.get(word, word) for word in argv]

    def brief(self, methods: Sequence[str]) -> str:
        """Return the help with the flags that are used most, and those of these methods."""
        every = self.parser(methods or self.methods)
        shown = self.parser(methods, OFTEN)
        count = len(every._actions) - len(shown._actions)
        one = (
            ""
            if methods or self.command == folders.DEMO
            else f"'fedstill {self.command} METHOD --help' adds a method's own, "
        )
        more = f"{one}'fedstill {' '.join([self.command, *methods])} --help-all' lists {count} more flags."
        return f"{shown.format_help()}\n{more}"

    def parser(self, methods: Sequence[str], only: Sequence[str] | None = None) -> flags.Parser:
        """Return the parser of the command's own flags, these methods' and the experiment's, or `only` these of them."""
        parser = flags.Parser(self.command, self.about, self.words, self.examples, all_by="--help-all")
        group = parser.add_argument_group("results")
        help = (
            f"folder for everything that the run writes; {NOWHERE} or --no-out: nothing is written [default {self.out}]"
        )
        flags.plain(parser, group, "out", help, "FOLDER", "a folder")
        if only is None:
            group.add_argument("--no-out", dest="no_out", action="store_true", help="write nothing")
            parser.takes["no_out"] = "left without a value"
        help = "run the seeds seed … seed+N−1 and report mean ± std over them [at least 1; default 1]"
        flags.plain(parser, group, "seeds", help, "N", "a whole number at least 1")
        flags.add_wide(parser, group)
        if only is None:
            help = f"also send the numbers of each round to {', '.join(TRACKERS)} (several with commas) [default none]"
            flags.plain(parser, group, "track", help, "NAME,NAME", f"one or more of {', '.join(TRACKERS)}")
            carrier.add(parser)
        flags.add_methods(parser, {name: METHODS[name] for name in methods}, Experiment)
        flags.add(parser, Experiment, only)
        return parser


def _kept(metric: str) -> str:
    """Return a metric's name; one of somebody's own by its reference with a checksum."""
    return own.reference_of(own.load("--metrics", metric)) if own.is_reference(metric) else metric


RUN = Usage(
    "run",
    "METHOD|METHOD.py:CLASS|FILE.toml",
    "Run one method with the settings that flags give, or a TOML file whose values flags override. It writes a "
    "folder that 'fedstill resume' can continue; its experiment.toml has all settings and can be run again. "
    "'fedstill methods' lists the methods.",
    (
        "fedstill run pfedsd",
        "fedstill run fedprox --mu 0.1 --rounds 100 --partition shards:2 --out runs/fedprox",
        "fedstill run pfedsd --clients 100 --participation 0.1 --seeds 3",
        "fedstill run runs/fedprox/experiment.toml --mu 1",
        "fedstill run my_method.py:MOON --mu 1 --model my_models.py:Net",
        "fedstill run fedavg --fine-tune 10 --newcomers 4 --new --forgetting",
    ),
)
COMPARE = Usage(
    "compare",
    "[METHOD…]",
    "Run several methods on the same data, partition and model, and set them side by side. METHOD 'all' is every "
    f"method; none means {' '.join(DEFAULT_METHODS)}. A method's own flags go to the methods that have them. "
    "With --attack: each method without attackers, with them under the mean, and under each rule of --average (median,krum). "
    "It writes a folder for each run, summary.json, figure.png and report.html.",
    (
        "fedstill compare local fedavg pfedsd",
        "fedstill compare fedavg fedprox scaffold --partition classes:2 --mu 0.1",
        "fedstill compare all --seeds 3 --out runs/all",
        "fedstill compare fedavg pfedsd --attack sign-flip --attackers 0.2 --average median,multi-krum",
    ),
)
SWEEP = Usage(
    job_.SWEEP,
    "METHOD|FILE.toml FIELD=VALUE,VALUE… [FIELD=VALUE,VALUE…]",
    "Run one method with several values of one field (its own, one of local training, participation, partition or clients), "
    "or with every combination of two, and set them side by side. Where clients are stacked, all values of floating fields of "
    "the method or of lr, and all seeds, are one stack. It writes a folder for each run, summary.json, figure.png, "
    "report.html and sweep.png: the score by value, or a heat map. Values with a comma are divided by ';' "
    "('partition=shards:2;classes:2,lognormal:1.0').",
    (
        "fedstill sweep pfedsd lam=0.1,0.5,1",
        "fedstill sweep fedprox lr=0.01,0.05,0.1 --mu 0.1 --seeds 3 --out runs/lr",
        "fedstill sweep pfedsd lam=0.1,0.5 tau=1,3 --out runs/grid",
        "fedstill sweep fedavg partition=dirichlet:0.1,shards:2 --seeds 3",
        "fedstill sweep runs/lr/lr=0.05/seed-0/experiment.toml mu=0,0.01,0.1",
    ),
)
DEMO = Usage(
    "demo",
    "",
    f"Compare {', '.join(DEFAULT_METHODS)} on 1,797 handwritten digits, divided unevenly among 20 clients. "
    "Nothing is downloaded. Writes the runs, summary.json and figure.png into --out, in place of an earlier demo.",
    ("fedstill demo", "fedstill demo --rounds 10 --out /tmp/demo"),
    out="fedstill-demo",
    own=DEFAULT_METHODS,
)


def run(argv: Sequence[str]) -> None:
    """`fedstill run`."""
    line = RUN.read(argv)
    if line is None:
        return
    flag_values, words = line
    if not words:
        raise InputError(
            "method", Shown("nothing"), f"a method {nearest('', METHODS)} or a TOML file: fedstill run METHOD"
        )
    if len(words) > 1:
        raise InputError("argument", words[1], "left out: 'fedstill compare' runs several methods")
    where, base = carrier.take(flag_values), _base(words[0])
    with flags.named(flag_values):
        _execute(plan([base.method], base, flag_values, "run"), where, argv)


def _execute(job: Job, where: carrier.Flags, argv: Sequence[str]) -> None:
    """Run a job, which these words asked for, on a transport."""
    job = dataclasses.replace(job, line=shlex.join(["fedstill", job.command, *argv]))
    with reserved(_name(job)) if job.dated and where.leads else contextlib.nullcontext(job.out) as out:
        job = dataclasses.replace(job, out=out)
        with where.start(job.out, job.first.device) as on:
            if on.leads:
                execute(job, transport=on.transport)


def _name(job: Job) -> str:
    """Return what a dated folder is named after the date."""
    method = job.first.method.id
    return {"run": method, job_.SWEEP: f"{job_.SWEEP}-{method}"}.get(job.command, job.command)


def _base(name: str) -> Experiment:
    """Return the experiment that a method's name or a TOML file stands for."""
    if name not in METHODS and (name.endswith(".toml") or Path(name).is_file()):
        return Experiment.from_toml(name)
    return Experiment(method=get(name)())


def compare(argv: Sequence[str]) -> None:
    """`fedstill compare`."""
    line = COMPARE.read(argv)
    if line is None:
        return
    flag_values, words = line
    chosen = {name: get(name) for name in (words or DEFAULT_METHODS) if name != "all"}
    if "all" in words:
        chosen = every_method(flag_values)
    where = carrier.take(flag_values)
    with flags.named(flag_values):
        compared = [cls() for cls in chosen.values()]
        if flag_values.get("attack", "none") != "none":
            _execute(plan_attacked(compared, flag_values), where, argv)
        else:
            _execute(plan(compared, Experiment(), flag_values, "compare"), where, argv)


def sweep(argv: Sequence[str]) -> None:
    """`fedstill sweep`."""
    line = SWEEP.read(argv)
    if line is None:
        return
    flag_values, words = line
    if len(words) not in (2, 3):
        raise InputError(
            "arguments",
            Shown(" ".join(words) or "nothing"),
            "a method and a field, or two: fedstill sweep pfedsd lam=0.1,0.5,1",
        )
    where = carrier.take(flag_values)
    sweeping = plan_sweep(_base(words[0]), words[1:], flag_values)
    with flags.named(dict.fromkeys(sweeping.explicit)):
        _execute(sweeping, where, argv)


def demo(argv: Sequence[str]) -> None:
    """`fedstill demo`."""
    line = DEMO.read(argv)
    if line is None:
        return
    flag_values, words = line
    if words:
        raise InputError("argument", words[0], "left out: 'fedstill compare METHOD…' runs other methods")
    flag_values.setdefault("out", DEMO.out)
    where = carrier.take(flag_values)
    with flags.named(flag_values):
        _execute(plan([get(name)() for name in DEFAULT_METHODS], Experiment(), flag_values, folders.DEMO), where, argv)


RESUME = (
    "Continue what was stopped, to the same bits as if it had not been. FOLDER is what --out made: of a run, or of a "
    "comparison, a sweep or several seeds, where runs that are finished are not run again. --rounds goes on with more rounds, "
    "--patience with a run that has stopped early."
)


def resume(argv: Sequence[str]) -> None:
    """`fedstill resume`."""
    examples = ("fedstill resume runs/fedprox", "fedstill resume runs/all", "fedstill resume runs/fedprox --rounds 100")
    parser = flags.Parser("resume", RESUME, "FOLDER", examples)
    flags.add(parser, Experiment, only=simulation.AMENDABLE)
    flags.add_wide(parser, parser.add_argument_group("results"))
    carrier.add(parser)
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if len(words) != 1:
        raise InputError("folder", Shown(" ".join(words) or "nothing"), "one folder that --out made")
    folder = Path(words[0])
    with flags.named(flag_values):
        changes = flags.take(Experiment, flag_values)
        with carrier.take(flag_values).start(folder) as on:
            if on.leads:
                _resume(folder, changes, on.transport, "wide" in flag_values)


def _resume(folder: Path, changes: Mapping[str, Any], transport: Transports | None, wide: bool) -> None:
    """Go on with what a folder holds."""
    own.allow()
    if saved.is_job(folder):
        goes_on = dataclasses.replace(_changed(saved.read_job(folder), changes), wide=wide)
        execute(goes_on, resume=True, transport=transport)
        return
    job = next((parent for parent in list(folder.absolute().parents)[:2] if saved.is_job(parent)), None)
    with contextlib.nullcontext() if job is None else FolderLock(job):
        _resume_run(folder, changes, transport, wide)


def _changed(job: Job, changes: Mapping[str, Any]) -> Job:
    """Return the job with another number of rounds, or other patience, for all its runs."""
    for label in job.experiments if "rounds" in changes else ():
        for number in range(job.seeds):
            folder = job.folder(label, number)
            assert folder is not None
            done = len(Journal(folder).history())
            if changes["rounds"] < done:
                raise InputError("rounds", changes["rounds"], f"at least {done}: so many are over in {folder}")
    changed = {label: dataclasses.replace(experiment, **changes) for label, experiment in job.experiments.items()}
    return dataclasses.replace(job, experiments=changed)


def _resume_run(folder: Path, changes: Mapping[str, Any], transport: Transports | None, wide: bool) -> None:
    """Go on with a single run."""
    if not (folder / folders.RUN).is_file():
        right = f"a folder that --out made, which holds {folders.RUN} or {saved.JOB}"
        if (folder / LOCK).exists():
            right = "one in which a run had begun: it was stopped before; the command that made it can be given again"
        raise InputError("folder", str(folder), right)
    check_format(folder)
    Journal(folder).check_settings()
    experiment = dataclasses.replace(Experiment.from_toml(folder / folders.RUN), **changes)
    label = experiment.method.id
    beside = saved.beside(folder)
    if beside is not None:
        say(
            f"{folder} was trained together with others: alone its last bits differ; 'fedstill resume {beside}' keeps them"
        )
    with watch([label], experiment.rounds) as shown, stoppable(folder):
        step = partial(shown.step, label, 0)
        run = simulation.resume(folder, **changes, progress=step, transport=transport)
        shown.resumed(label, 0, run.history[-1])
    facts = Facts.of(experiment, prepare.federation_of(experiment))
    line = folders.line_of(folder) or f"fedstill resume {folder}"
    folders.save(folder, {label: experiment}, {label: [(folder, run)]}, facts, command="resume", line=line)
    results([run], facts, wide)
    say()
    say(folders.draw(folder, {label: [run]}, facts))
    say(folders.report(folder))
