"""The command `costs`: what a round of each method costs, as in the first paper's Tables 10 and 11."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core import settings
from ..core.errors import InputError, Shown, nearest
from ..core.method import Method
from ..core.settings import setting
from ..data import Federation
from ..data.federation import Client
from ..engine.flops import Only
from ..methods import METHODS, get
from ..report import published
from ..report.costs import NONE, scaled
from ..report.fit import Order
from ..report.text import Facts, facts_line
from ..run import accounting, prepare, simulation
from ..run.accounting import Cost
from ..run.callbacks import Progress
from ..run.experiment import Experiment
from ..run.session import Start
from ..server.coordinator import Record
from ..server.records import SPLIT
from ..transport.local import LocalTransport
from . import flags
from .job import every_method, plan
from .live import watch
from .screen import table, width

ROUNDS = 4  # enough for every method to send all that it sends in later rounds; the first is not timed
FIELDS = tuple(
    field.name
    for field in settings.fields_of(Experiment)
    if field.metadata["group"] != "scores" and field.name not in ("eval_every", "checkpoint_every")
)
WIDTH = 118  # of the notes, at most
TIMES = Order(("paper: server %", "paper: client %", "paper: communication %"), ("paper: s",), ("s a round",))
AMOUNTS = Order(
    ("numbers", "forward %", "ours by its rule", '"GFLOPs"', 'paper: "MB"', "× fedavg"),
    ("steps",),
    ("FLOPs", "B down", "B up"),
)
Columns = list[tuple[str, list[str]]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own flags."""

    time: bool = setting(True, "train some rounds and measure the time; off: only count FLOPs and bytes", group="costs")


def _parser(methods: dict[str, type[Method]]) -> flags.Parser:
    """Return the parser of the command's flags, with those of these methods."""
    parser = flags.Parser(
        "costs",
        "What a round of each method costs: seconds by where they go (communication, clients, server), and for one participant "
        "SGD steps, FLOPs, bytes. METHOD 'all' is every method. A few rounds are trained to take the time (--rounds; the first "
        "is left out); with --no-time only two clients with two samples each are, which is quick for large models, too. In the "
        f"first paper's setting ({published.COMMAND}) its Tables 10 and 11 stand beside ours.",
        "METHOD…",
        (
            "fedstill costs fedavg pfedsd per-fedavg pfedme",
            "fedstill costs all --model resnet18 --batch-size 64 --no-time",
            f"fedstill costs fedavg fedfomo pfedsd {published.COMMAND} --no-time",
        ),
    )
    flags.add(parser, Options)
    flags.add_wide(parser, parser.add_argument_group("results"))
    flags.add_methods(parser, methods, Experiment)
    flags.add(parser, Experiment, FIELDS)
    return parser


def costs(argv: Sequence[str]) -> None:
    """`fedstill costs`."""
    flag_values, words = _parser(METHODS).read(argv)
    if "help" in flag_values:
        _parser({name: METHODS[name] for name in words if name in METHODS} or METHODS).print_help()
        return
    if not words:
        right = f"one or more methods {nearest('', METHODS)}, or all: fedstill costs METHOD…"
        raise InputError("method", Shown("nothing"), right)
    chosen = every_method(flag_values) if "all" in words else {name: get(name) for name in words}
    options = Options(**flags.take(Options, flag_values))
    flag_values = {name: value for name, value in flag_values.items() if name != "time"}
    with flags.named(flag_values):
        job = plan([cls() for cls in chosen.values()], Experiment(rounds=ROUNDS), flag_values, "costs")
        _measure(job.experiments, options.time, job.wide)


def _measure(experiments: dict[str, Experiment], timed: bool, wide: bool) -> None:
    """Measure or count the costs of every experiment, and print the tables."""
    first = next(iter(experiments.values()))
    federation = prepare.federation_of(first)
    experiments = {label: dataclasses.replace(e, eval_every=e.rounds) for label, e in experiments.items()}
    reduced = dataclasses.replace(
        federation, clients=tuple(map(_reduced, federation.clients)), test=None, external=None
    )
    for experiment in experiments.values():
        prepare.from_experiment(experiment, reduced)  # every refusal comes before the first round
    sizes = tuple(len(client.y_train) for client in federation.clients)
    costs = {}
    with watch(list(experiments), first.rounds) as progress:
        for label, experiment in experiments.items():
            progress.start(label)

            def step(record: Record, label: str = label) -> None:
                progress.step(label, 0, {"round": record["round"]})  # without accuracies

            costs[label] = _train(experiment, federation, step) if timed else _count(experiment, reduced, sizes, step)
    as_published = published.applies(first, federation.shape, federation.classes)
    if timed:
        _print(_times(costs, as_published), _time_notes(first, as_published), wide, TIMES)
    notes = [*_notes(costs, as_published), facts_line(Facts.of(first, federation))]
    if not as_published:
        notes.append(f"the first paper's Tables 10 and 11 stand beside ours with {published.COMMAND}")
    elif differing := published.differences(first, len(federation)):
        notes.append(f"not as in the paper: {', '.join(differing)}")
    _print(_amounts(costs, as_published), notes, wide, AMOUNTS)


def _print(cells: Columns, notes: Sequence[str], wide: bool, order: Order) -> None:
    """Print a table with its notes."""
    room = min(WIDTH, width() or WIDTH)
    lines = [line for note in notes for line in textwrap.wrap(note, room, subsequent_indent="  ")]
    table(cells, [False] * len(cells[0][1]), lines, wide, order, "--wide shows them")


def _train(experiment: Experiment, federation: Federation, progress: Progress) -> Cost:
    """Return the cost, measured by training; messages are turned into bytes and back, as between machines."""
    ready, _ = prepare.from_experiment(experiment, federation)
    wired = functools.partial(LocalTransport, through_wire=True)
    run = simulation.finish(Start(ready, progress=progress), wired)
    return _with_bytes(run.cost, run.history[-1])


def _count(experiment: Experiment, reduced: Federation, sizes: tuple[int, ...], progress: Progress) -> Cost:
    """Return the cost without times: messages from rounds of two clients with two samples each, work from the real sizes."""
    two = 2 / len(reduced) if len(reduced) > 2 else 1.0
    small = dataclasses.replace(
        experiment, participation=two, epochs=1, local_steps=0, engine="one", minimum=1, buffer=0,
        personal_cap=experiment.personal_cap or 1,
    )  # fmt: skip
    run = simulation.run(small, federation=reduced, progress=progress)
    bench = run.trainer.bench
    task = dataclasses.replace(bench.task, epochs=experiment.epochs, local_steps=experiment.local_steps)
    sized = Only(dataclasses.replace(bench.data.train, sizes=sizes))
    return _with_bytes(accounting.cost(run, dataclasses.replace(bench, task=task, data=sized)), run.history[-1])


def _reduced(client: Client) -> Client:
    """Return a client with two samples for training and two for testing, all zeros, with which nothing diverges."""
    cut = {name: None if values is None else values[:2] for name, values in vars(client).items()}
    zeros = {name: torch.zeros_like(values) for name, values in cut.items() if values is not None and name[0] == "x"}
    return Client(**{**cut, **zeros})  # type: ignore[arg-type]


def _with_bytes(cost: Cost, record: Record) -> Cost:
    """Return the cost with the bytes of this round, the last, in which a method sends all that it sends in later ones."""
    return dataclasses.replace(cost, bytes_down=record["bytes_down"], bytes_up=record["bytes_up"])


def _times(costs: dict[str, Cost], as_published: bool) -> Columns:
    """Return the columns of the table of times."""
    totals = {label: sum(cost.seconds.values()) for label, cost in costs.items()}
    out: Columns = [("method", list(costs)), ("s a round", [f"{seconds:.2f}" for seconds in totals.values()])]
    for name in SPLIT:
        shares = [f"{100 * cost.seconds[name] / totals[label]:.1f}" for label, cost in costs.items()]
        out.append((f"{name} %", shares))
    if as_published:
        out.append(("paper: s", [published.cell(label, "{row.seconds:.2f}") for label in costs]))
        for i, name in enumerate(SPLIT):
            out.append((f"paper: {name} %", [published.cell(label, f"{{row.shares[{i}]:.1f}}") for label in costs]))
    return out


def _time_notes(experiment: Experiment, as_published: bool) -> list[str]:
    """Return the notes to the table of times."""
    notes = [
        f"a whole round, mean of rounds 2 to {experiment.rounds}"
        if experiment.rounds > 1
        else "a whole round, the first",
        "communication: messages turned into bytes and back in this process, no network; client: all participants' work, "
        "however it is spread over cores or stacked; server: sampling, sending, merging",
    ]
    times_note = "the paper's times are those of its machines; only the shares and the order can be compared"
    return [*notes, times_note] if as_published else notes


def _amounts(costs: dict[str, Cost], as_published: bool) -> Columns:
    """Return the columns of the table of steps, FLOPs and bytes."""
    flops = {label: cost.flops for label, cost in costs.items()}
    forward = [None if f is None or not f.total else 100 * f.forward / f.total for f in flops.values()]
    out: Columns = [
        ("method", list(costs)),
        scaled("steps", [cost.steps for cost in costs.values()], plain=True),
        scaled("FLOPs", [None if f is None else f.total for f in flops.values()]),
        ("forward %", [NONE if share is None else f"{share:.0f}" for share in forward]),
    ]
    base = flops.get("fedavg")
    if base is not None and len(costs) > 1:
        out.append(("× fedavg", [NONE if f is None else f"{f.total / base.total:.2f}" for f in flops.values()]))
    for heading, values in (
        ("B down", [cost.bytes_down for cost in costs.values()]),
        ("B up", [cost.bytes_up for cost in costs.values()]),
        (" numbers", [_numbers(cost) for cost in costs.values()]),
    ):
        out.append(scaled(heading, values))
    if as_published:
        out.append(('paper: "MB"', [published.cell(label, "{row.megabytes:.2f}") for label in costs]))
        out.append(('"GFLOPs"', [published.cell(label, "{flops}") for label in costs]))
        out.append(
            ("ours by its rule", [NONE if (g := _by_rule(cost)) is None else f"{g:.2f}" for cost in costs.values()])
        )
    return out


def _numbers(cost: Cost) -> float | None:
    """Return how many numbers a participant receives and sends, where that is known."""
    return None if cost.numbers_down is None or cost.numbers_up is None else cost.numbers_down + cost.numbers_up


def _by_rule(cost: Cost) -> float | None:
    """Return 10⁹ multiply-adds as the paper counts them: a training step is three forward passes."""
    if cost.work is None:
        return None
    steps, outside = sum(phase.forward for phase in cost.work.phases), cost.work.begin + cost.work.finish
    return (3 * steps + outside.forward) / 2e9


def _notes(costs: dict[str, Cost], as_published: bool) -> list[str]:
    """Return the notes to the table of steps, FLOPs and bytes."""
    sizes = {cost.samples for cost in costs.values() if cost.samples is not None}
    client = f"one participant in a round, a client of mean size ({', '.join(map(str, sorted(sizes)))} samples)"
    lines = [
        f"{client}; kB = 1,000 bytes, numbers down + up, both in the last round",
        "FLOPs: matrix products, convolutions (2 a multiply-add) and Fourier transforms, counted on the method's own steps; not "
        "elementwise work (losses, activations, SGD, terms on weights), the server's, or scoring",
    ]
    lines += [
        f"{label}: FLOPs could not be counted ({cost.uncounted})" for label, cost in costs.items() if cost.uncounted
    ]
    return [*lines, *published.counting_notes(costs)] if as_published else lines
