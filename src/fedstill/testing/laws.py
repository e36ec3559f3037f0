"""The laws that every method obeys, as functions: each runs a method on a problem and raises `Broken` where it does not hold.

A law that holds returns a line of evidence, for example the largest difference that was seen.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core import tree
from ..core.errors import printable, shorten
from ..core.method import Method, Upload
from ..core.settings import values_of
from ..core.tree import Params, Tree
from ..data import Federation
from ..edge.edge import Edge
from ..run.result import Run
from ..run.simulation import simulate
from ..transport.local import LocalTransport
from ..transport.messages import Transport
from .leaks import leaks
from .problems import SETTINGS, distance, farthest, identical, needed, states
from .spy import Spy

ROUNDING = 1e-10  # in float64, over a few rounds; of the largest number where that is above 1
STILL = 1e-8  # less than a parameter moves by that is trained
WIRED = functools.partial(LocalTransport, through_wire=True)  # a transport whose messages become bytes and back

STACKED = "stacked equals one at a time"
WIRE = "through the wire and back"
NEUTRAL = "neutral settings give the parent"
PRIVATE = "private entries are never uploaded"
INVISIBLE = "cohorts and padding are invisible"
REPEATED = "same seed, same bits"
ALIASES = "trees never share memory"
ORDER = "the order of uploads is invisible"


class Broken(AssertionError):
    """A law that does not hold: which, for which method, by how much and where."""

    def __init__(self, law: str, method: Method, what: str) -> None:
        self.law, self.method, self.what = law, name_of(method), printable(shorten(what, 1000))
        super().__init__(f"{self.law}: {self.method}: {self.what}")


@dataclass(frozen=True)
class Problem:
    """A small federation, a model, and the settings of the runs on it."""

    model: nn.Module
    data: Federation
    settings: Mapping[str, Any] = field(default_factory=lambda: dict(SETTINGS))
    head: str | Sequence[str] | None = None

    def run(self, method: Method, transport: Callable[[Edge], Transport] | None = None, **changes: Any) -> Run:
        """Return a run of the method, with these settings changed."""
        settings = {"engine": "one", **self.settings, **needed(method), **changes}
        return simulate(method, model=self.model, data=self.data, head=self.head, transport=transport, **settings)


def name_of(method: Method) -> str:
    """Return a method with the values of the fields that differ from their defaults: "FedProx(mu=0.3)"."""
    fields = {f.name: f.default for f in dataclasses.fields(method)}
    changed = [f"{name}={value!r}" for name, value in values_of(method).items() if value != fields[name]]
    return f"{type(method).__name__}({', '.join(changed)})"


# ---- the laws ------------------------------------------------------------------------------------------------------------
def stacked_equals_one(problem: Problem, method: Method, within: float = ROUNDING, moves: float = STILL) -> str:
    """Check that a stack of clients gives what clients give one by one.

    Some parameter must move by more than `moves`, without weight decay, and so by the loss.
    """
    one, stacked = (problem.run(method, engine=engine) for engine in ("one", "stacked"))
    gap = _close(STACKED, method, one, stacked, within, "between the engines")
    _same_records(STACKED, method, one, stacked, within)
    if moves and _moved(problem, method, one) <= moves:
        raise Broken(STACKED, method, f"no parameter has moved by more than {moves:g}: nothing was trained")
    return f"largest difference {gap:.0e}"


def _moved(problem: Problem, method: Method, run: Run) -> float:
    """Return by how much some parameter moves by the loss alone; `run` is the problem's own run.

    Weight decay moves parameters in any case (and BatchNorm's statistics, which do not count): where it may have made all of the
    way, the problem is run again without it.
    """
    task, moved = run.task, _way(run)
    if task.weight_decay:
        steps, largest = sum(record["steps"] for record in run.history), max(map(_largest, states(run).values()))
        if moved <= 2 * steps * task.lr * task.weight_decay * largest / max(1e-3, 1 - task.momentum):
            return _way(problem.run(method, engine="one", weight_decay=0.0))
    return moved


def _way(run: Run) -> float:
    """Return how far some parameter is from where it began."""
    net = run.task.net
    first, still = net.export(net.initial()), set(net.buffers)
    trained = [name for name in first if name not in still]
    models = ({name: state[name] for name in trained} for state in states(run).values())
    return max(distance({"": model}, {"": {name: first[name] for name in trained}}) for model in models)


def _largest(state: Params) -> float:
    """Return the largest number of a model."""
    return max((value.abs().max().item() for value in state.values() if value.numel()), default=0.0)


def wire_changes_nothing(problem: Problem, method: Method) -> str:
    """Check that messages as bytes give the same bits."""
    _equal(WIRE, method, problem.run(method), problem.run(method, WIRED), "where messages travel as bytes")
    return "the same bits"


def neutral_gives_parent(
    problem: Problem,
    variant: Method,
    parent: Method,
    of: str = "both",
    within: float = 0.0,
    parent_problem: Problem | None = None,
    engine: str = "one",
) -> str:
    """Check that a method with neutral values gives what a simpler one gives, in `of` models: generic, personal or both."""
    runs = problem.run(variant, engine=engine), (parent_problem or problem).run(parent, engine=engine)
    ours, theirs = ({n: s for n, s in states(run).items() if of == "both" or n.startswith(of)} for run in runs)
    gap, where = farthest(ours, theirs)
    if not gap <= within:
        raise Broken(NEUTRAL, variant, f"{where} differs from {name_of(parent)}'s by {gap:.1e}, in engine {engine}")
    return f"{name_of(variant)} is {name_of(parent)}" + (f", to {gap:.0e}" if gap else ", to the bit")


def given_away(problem: Problem, method: Method, engine: str) -> list[list[str]]:
    """Return for each upload of a short run what it gives away of the private entries, as "what went up ← what is private"."""
    spy = Spy()
    result = problem.run(method, spy.transport, engine=engine, participation=1.0)
    task, initial = result.task, result.task.net.export(result.task.net.initial())
    unknown = sorted(method.private(task) - {*initial, *task.net.initial()})
    if unknown:  # nothing would be looked for
        raise Broken(PRIVATE, method, f"private() names {unknown[0]!r}, which is no entry of the model")
    memories: dict[int, Tree] = {}
    findings = []
    for reply, after in (seen for seen in spy if seen[0].kind == "train"):
        before = memories.get(reply.client, method.init_client(task, initial))
        findings.append(leaks(reply.up, before, after, initial, method.private(task)))
        memories[reply.client] = after
    return findings


def private_stays_private(problem: Problem, method: Method, engine: str) -> str:
    """Check that no upload has a private entry, by its name, as it is, or as an affine function of it."""
    findings = given_away(problem, method, engine)
    found = [(i, line) for i, lines in enumerate(findings) for line in lines]
    if found:
        each, (number, line) = problem.data, found[0]
        raise Broken(
            PRIVATE, method, f"{line}, in upload {number + 1} of {len(findings)} ({len(each)} clients, {engine})"
        )
    return f"{len(findings)} uploads give nothing away"


def cohorts_are_invisible(problem: Problem, method: Method, within: float = ROUNDING) -> str:
    """Check that clients trained in smaller groups, and so padded to other sizes, give the same."""
    gaps, together = [], problem.run(method, engine="stacked", rounds=2)
    for cohort in (1, 2):
        other = problem.run(method, engine="stacked", rounds=2, cohort=cohort)
        gaps.append(_close(INVISIBLE, method, together, other, within, f"between one stack and cohorts of {cohort}"))
    _equal(INVISIBLE, method, problem.run(method), problem.run(method, cohort=2), "with cohorts of 2 in engine one")
    return f"largest difference {max(gaps):.0e}"


def same_seed_same_bits(problem: Problem, method: Method, engine: str) -> str:
    """Check that a run repeats itself, draws nothing from a global generator, and does not depend on being scored.

    Both runs use the same object, so that what it keeps for itself is found.
    """
    kept = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            first = problem.run(method, engine=engine, rounds=2)
            torch.manual_seed(2)
            np.random.seed(2)
            random.seed(2)
            generators = _generators()
            second = problem.run(method, engine=engine, rounds=2, eval_every=2)
            if _generators() != generators:
                raise Broken(
                    REPEATED,
                    method,
                    f"a hook draws from a global generator, in engine {engine}; task.uniforms is keyed",
                )
    finally:
        np.random.set_state(kept[0])
        random.setstate(kept[1])
    _equal(
        REPEATED,
        method,
        first,
        second,
        f"of a second run of the same seed that is scored less often, in engine {engine}",
    )
    if identical(
        states(first), states(problem.run(method, engine=engine, rounds=2, seed=problem.settings["seed"] + 7))
    ):
        raise Broken(REPEATED, method, "another seed gives the same models")
    return "the same bits"


def nothing_aliases(problem: Problem, method: Method, engine: str) -> str:
    """Check that uploads, memories and the server's state share no memory, and that the given model is not changed."""
    spy, given = Spy(), copy.deepcopy(problem.model.state_dict())
    result = problem.run(method, spy.transport, engine=engine, participation=1.0, rounds=2)
    last = [(reply, memory) for reply, memory in spy if reply.kind == "train" and reply.round == 2]
    if len(last) != len(problem.data):
        raise Broken(ALIASES, method, f"{len(last)} uploads of {len(problem.data)} clients were seen in a round of all")
    for reply, memory in last:
        mine = f"client {reply.client}'s upload", f"client {reply.client}'s memory"
        _apart(method, reply.up, memory, *mine, engine)
        _apart(method, memory, result.server, mine[1], "the server's state", engine)
        _apart(method, reply.up, result.server, mine[0], "the server's state", engine)
        for other, theirs in last:
            if other is not reply:
                _apart(method, reply.up, other.up, mine[0], f"client {other.client}'s upload", engine)
                _apart(method, reply.up, theirs, mine[0], f"client {other.client}'s memory", engine)
    now = problem.model.state_dict()
    changed = [name for name, value in given.items() if not torch.equal(value, now[name])]
    if changed:
        raise Broken(
            ALIASES, method, f"the run has changed the model that it was given, at {changed[0]} (engine {engine})"
        )
    generic = result.generic()
    name = next(iter(generic))
    generic[name].fill_(7.0)
    if torch.equal(result.generic()[name], generic[name]):
        raise Broken(ALIASES, method, f"the generic model that a run returns is the server's own, at {name}")
    return f"{len(last)} uploads and memories beside the server's state"


def uploads_in_any_order(problem: Problem, method: Method, within: float = ROUNDING) -> str:
    """Check that `merge` goes by an upload's client and not by its place: the same uploads in the opposite order."""
    spy = Spy()
    run = problem.run(method, spy.transport, participation=1.0, rounds=1)
    task, sizes = dataclasses.replace(run.task, round=1), problem.data.sizes("train")
    downs = {order.client: order.down for order in spy.orders if order.kind == "train"}
    uploads = [Upload(r.up, float(sizes[r.client]), r.client, down=downs[r.client]) for r in spy.trained()]
    ends = [
        {"the server's": tree.flatten(method.merge(task, method.init_server(task, task.net.initial()), order))}
        for order in (uploads, uploads[::-1], [*uploads[1:], *uploads[:1]])
    ]
    gaps = [farthest(ends[0], other) for other in ends[1:]]
    gap, where = max(gaps, key=lambda gap: gap[0])
    if not gap <= within * _size(ends[0]):
        raise Broken(
            ORDER, method, f"merge() gives another {where} where uploads come in another order: {gap:.1e} away"
        )
    return f"{len(uploads)} uploads, largest difference {gap:.0e}"


# ---- comparisons ---------------------------------------------------------------------------------------------------------
def _close(law: str, method: Method, a: Run, b: Run, within: float, when: str) -> float:
    ours, theirs = states(a), states(b)
    gap, where = farthest(ours, theirs)
    if not gap < within * _size(ours):
        raise Broken(law, method, f"{where} differs by {gap:.1e} {when}")
    return gap


def _size(models: Mapping[str, Params]) -> float:
    """Return the largest number in some models, 1 at least: rounding grows with it."""
    leaves = (value for model in models.values() for value in model.values() if value.numel())
    return max(1.0, *(float(value.double().abs().max()) for value in leaves))


def _equal(law: str, method: Method, a: Run, b: Run, when: str) -> None:
    ours, theirs = states(a), states(b)
    if not identical(ours, theirs):
        gap, where = farthest(ours, theirs)
        raise Broken(law, method, f"{where} differs by {gap:.1e} {when}")


def _same_records(law: str, method: Method, one: Run, other: Run, within: float) -> None:
    """Compare the losses and the clients' scores of each round."""
    if len(one.history) != len(other.history):
        raise Broken(law, method, f"{len(one.history)} and {len(other.history)} rounds were run")
    for a, b in zip(one.history, other.history, strict=True):
        if not _near(a["loss"], b["loss"], within):
            raise Broken(law, method, f"the loss of round {a['round']} is {a['loss']:.12g} and {b['loss']:.12g}")
        ours, theirs = (record.get("personal_clients", {}) for record in (a, b))
        if ours.keys() != theirs.keys() or any(not _near(ours[k], theirs[k], within) for k in ours):
            raise Broken(law, method, f"the clients' scores of round {a['round']} differ")


def _near(a: float, b: float, within: float) -> bool:
    return abs(a - b) <= within * max(1.0, abs(a))


def _apart(method: Method, a: Tree, b: Tree, mine: str, theirs: str, engine: str) -> None:
    shared = tree.aliases(a, b)
    if shared:
        raise Broken(ALIASES, method, f"{mine} shares memory with {theirs}, at {shared[0]} (engine {engine})")


def _generators() -> tuple[bytes, str, str]:
    """Return the states of the global generators of torch, numpy and Python."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), repr(random.getstate())
