"""Sections of soak.py: forged uploads and mutated messages at the gate, whole runs with one bad client, and what the gate costs.

What may pass is decided here a second time, plainly and without the gate's code: see `possible`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import math
import random
import resource
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedstill as fs
from fedstill.core import tree
from fedstill.core.tree import Tree
from fedstill.run.driver import Driver
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.run.session import Start, start
from fedstill.server.coordinator import Coordinator
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the small federations are the tests'

Row = tuple[str, str, str]
CLIENTS, HONEST = 60, 10  # of a round; the others' replies are mutated
TOP = math.sqrt(3.4028234663852886e38)  # √ of the largest float32
TINY = "the default method, 100 clients of 14 samples"
SMALLEST = "fedavg, stacked, 100 clients of 14 samples"
LATEST = 0.02  # most of a round's time that the gate may take
SLOW, ROOM = 1.0, 128 << 20  # seconds of one message, bytes that all may leave behind


# ---- a round to be attacked --------------------------------------------------------------------------------------------
class Round:
    """The first round of SCAFFOLD, whose uploads have parameters, buffers, whole numbers and a second branch."""

    def __init__(self) -> None:
        from tests.problems import ragged

        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.sizes = [3 + k % 7 for k in range(CLIENTS)]
        settings = Training(rounds=1, epochs=2, batch_size=4, device="cpu", engine="one", on_divergence="refuse")
        sim = prepare(fs.SCAFFOLD(), net, ragged([(n, 2) for n in self.sizes]), None, settings)
        (self.coordinator,) = start([Start(sim)]).coordinators
        self.task = dataclasses.replace(sim.task, round=1)
        self.orders = [self.coordinator.order("train", self.task, k) for k in range(CLIENTS)]
        self.right = self.coordinator.example(self.task, self.orders[0].down)
        self.steps = [2 * math.ceil(n / min(4, n)) for n in self.sizes]

    def reply(self, client: int) -> Reply:
        """Return a reply that is right, with numbers of its own."""
        up = tree.map(lambda v: v + 0.01 * client if v.is_floating_point() else v + client, self.right)
        report = {"loss": 0.5 + client, "steps": float(self.steps[client]), "finite": 1.0}
        report["samples"] = float(self.sizes[client])
        return Reply("train", 1, client, up, report, order=self.orders[client].id)

    def inspect(self, replies: Sequence[Reply]) -> tuple[list[Reply], Mapping[str, str]]:
        """Pass replies through the coordinator's gate."""
        accepted, record = self.coordinator.inspect(self.task, self.orders, replies)
        return accepted, record.get("rejected", {})

    def merged(self, replies: Sequence[Reply]) -> tree.Params:
        """Return the server's next state."""
        uploads = self.coordinator.uploads(replies, self.orders)
        state = self.coordinator.method.merge(self.task, self.coordinator.state.server, uploads)
        return tree.flatten(state)

    def judge(self, replies: Sequence[Reply]) -> collections.Counter[str]:
        """Have the gate divide replies; fail where it differs from `possible` or the merge from that of the possible ones."""
        right = [r for r in replies if self.possible(r)]
        accepted, reasons = self.inspect(replies)
        wrong = {r.client for r in right} ^ {r.client for r in accepted}
        for client in wrong:
            report = next(r.report for r in replies if r.client == client)
            raise AssertionError(f"client {client}: {reasons.get(str(client), 'accepted')}; it reports {report!r:.200}")
        assert set(reasons) == {str(r.client) for r in replies} - {str(r.client) for r in right}
        assert all(reason and "\n" not in reason and len(reason) < 400 for reason in reasons.values())
        ours, theirs = self.merged(accepted), self.merged(right)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "the merge differs"
        assert all(bool(torch.isfinite(leaf).all()) for leaf in ours.values()), "the merge is not finite"
        return collections.Counter(_kind(reason) for reason in reasons.values())

    def possible(self, reply: Reply) -> bool:
        """Return whether a reply may be merged: by a second, slower way to say so."""
        sums: list[float] = []

        def alike(own: Any, right: Any) -> bool:
            if isinstance(right, dict):
                return isinstance(own, dict) and set(own) == set(right) and all(alike(own[n], right[n]) for n in right)
            if not isinstance(own, Tensor) or own.layout != torch.strided or own.is_meta or own.requires_grad:
                return False
            if own.dtype != right.dtype or own.shape != right.shape:
                return False
            numbers = np.asarray(own.tolist(), dtype=np.float64)
            sums.append(float((np.abs(numbers) ** 2).sum()))
            return own.is_floating_point() or bool((np.abs(numbers) <= 2.0**53).all())

        with np.errstate(all="ignore"):
            fits = alike(reply.up, self.right) and math.sqrt(sum(sums)) <= TOP
        report = reply.report
        if not fits or not isinstance(report, dict) or len(report) > 64 or not {"loss", "steps"} <= set(report):
            return False
        for name, value in report.items():
            if not isinstance(name, str) or not _number(value) or not abs(value) <= 2**53:
                return False
            if name in COUNTED and (value < 0 or value != math.floor(value)):
                return False
        if report["steps"] > self.steps[reply.client] or report.get("samples", 1) == 0:
            return False
        for hits, of in RATES:
            if hits in report and of in report and report[hits] > report[of]:
                return False
        registered = report.get("samples", self.sizes[reply.client]) == self.sizes[reply.client]
        return registered and report.get("finite", 1) == 1


COUNTED = (
    "steps", "samples", "tests", "personal", "generic", "before", "after", "downloaded", "trained", "last", "undecided",
    "undecided_last", "begun",
)  # fmt: skip
RATES = (
    ("personal", "samples"), ("generic", "samples"), ("before", "samples"), ("after", "samples"),
    ("downloaded", "tests"), ("trained", "tests"),
)  # fmt: skip
KINDS = (  # of causes, by words in them
    "missing", "does not belong", "shape", "dtype", "not finite", "too large", "no plain tensor", "no tensor", "no tree",
    "branches", "with the name", "it reports", "its report", "the training loss", "no longer finite", "no message",
    "not its own", "another client",
)  # fmt: skip


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(reason: str) -> str:
    return next((kind for kind in KINDS if kind in reason), reason)


# ---- mutations ---------------------------------------------------------------------------------------------------------
HUGE = (1e30, -1e30, 1.9e19, math.nan, math.inf, -math.inf)
FINE = (0.0, -1.0, 1e10, 1e-30, 1e18)
TYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, "5", "", b"x", True, False, math.nan, math.inf, -math.inf, 0, -9, 1e12, 10**18, 10**400, 1.5, -0.0, [], {}, (1,),
    1e30, 2**53, 2**53 + 1, object(), torch.tensor(1.0), np.float64(2.0), 1 + 2j,
)  # fmt: skip
NAMES: tuple[Any, ...] = ("", "more", "params", "a|b", "|", "x" * 5000, "weight\n", 0, None, ("a",), "0.weight", "c")
NUMBERS = (
    "loss", "steps", "samples", "finite", "seconds", "flops", "generic", "personal", "tests", "trained", "downloaded",
    "before", "after", "last", "new",
)  # fmt: skip


def _branches(up: Tree, depth: int = 4) -> list[Tree]:
    """Return the branches of a tree, which may contain itself."""
    inner = [branch for branch in up.values() if isinstance(branch, dict)] if depth else []
    return [up, *(each for branch in inner for each in _branches(branch, depth - 1))]


def _places(up: Tree) -> list[tuple[Tree, str]]:
    """Return the branches and names of all tensors."""
    return [(branch, name) for branch in _branches(up) for name, v in branch.items() if isinstance(v, Tensor)]


def _with(leaf: Tensor, value: float, rng: random.Random) -> Tensor:
    """Return a tensor with one other number."""
    leaf = leaf.contiguous().clone()
    if leaf.dtype not in (torch.float32, torch.int64):
        return leaf
    if leaf.is_floating_point():
        leaf.view(-1)[rng.randrange(leaf.numel())] = value
    else:
        leaf.view(-1)[0] = rng.choice((2**62, -(2**60), 2**53, 7))
    return leaf


def _shaped(leaf: Tensor, rng: random.Random) -> Tensor:
    """Return the tensor in another shape, or in its own where it has only that."""
    ways: list[Callable[[], Tensor]] = [
        lambda: leaf.unsqueeze(0), lambda: leaf.unsqueeze(-1), lambda: leaf.flatten(),
        lambda: leaf.t() if leaf.ndim == 2 else leaf, lambda: leaf[:1] if leaf.ndim else leaf,
        lambda: leaf.reshape(-1)[:1], lambda: leaf.reshape(-1)[0], lambda: leaf.reshape(-1)[:0],
        lambda: leaf.expand(2, *leaf.shape), lambda: torch.cat([leaf.reshape(-1)] * 2), lambda: leaf.reshape(1, -1),
    ]  # fmt: skip
    return rng.choice(ways)()


def _odd_tensor(leaf: Tensor, rng: random.Random) -> Any:
    """Return something that is no plain tensor."""
    ways: list[Callable[[], Any]] = [
        lambda: leaf.to_sparse() if leaf.ndim else leaf.to("meta"), lambda: leaf.to("meta"),
        lambda: leaf.float().requires_grad_(), lambda: leaf.tolist(), lambda: leaf.numpy(), lambda: {"x": leaf},
        lambda: rng.choice(ODD), lambda: nn.Parameter(leaf.float()), lambda: {},
    ]  # fmt: skip
    return rng.choice(ways)()


def forged(reply: Reply, rng: random.Random) -> Reply:
    """Return the reply with one to three mutations of its upload, its report or both."""
    up, report = copy.copy(reply.up), dict(reply.report)
    up = {name: dict(branch) for name, branch in up.items()}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(up)
        branch, name = rng.choice(places) if places else (up, "params")
        leaf = branch.get(name)
        what = rng.randrange(16)
        if what >= 9:
            report = _misreported(report, rng)
        elif what == 8:
            branch[rng.choice(NAMES)] = rng.choice(
                (leaf, {}, {"x": leaf}, torch.ones(2), None, up if rng.random() < 0.2 else {})
            )
        elif what == 7:
            branch.pop(name, None)
        elif what == 6:
            del up[rng.choice(list(up))]
        elif not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_meta or not leaf.numel():
            continue
        elif what == 5:
            branch[name] = _odd_tensor(leaf.detach(), rng)
        elif what == 4:
            branch[name] = (leaf.real if leaf.is_complex() else leaf).detach().to(rng.choice(TYPES))
        elif what == 3:
            branch[name] = _shaped(leaf.detach(), rng)
        else:
            branch[name] = _with(leaf.detach(), rng.choice(HUGE if what else FINE), rng)
        if not up:
            break
    whole: Any = rng.choice((None, [], "up", up, {})) if rng.random() < 0.01 else up
    told: Any = rng.choice((None, [], "5", {}, {str(i): 1.0 for i in range(99)})) if rng.random() < 0.01 else report
    return dataclasses.replace(reply, up=whole, report=told)


def _misreported(report: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    name: Any = rng.choice(NUMBERS)
    if rng.random() < 0.15:
        return {n: v for n, v in report.items() if n != name}
    if rng.random() < 0.05:
        name = rng.choice(NAMES)
    return {**report, name: rng.choice(ODD) if rng.random() < 0.8 else rng.choice((0.0, 1.0, 2.0, 3.0, 1e9))}


def _batches(count: int) -> Iterator[range]:
    """Yield the numbers of mutations, as many at a time as a round has."""
    step = CLIENTS - HONEST
    return (range(first, min(first + step, count)) for first in range(0, count, step))


# ---- sections ----------------------------------------------------------------------------------------------------------
def uploads(short: bool) -> list[Row]:
    """Forge uploads and reports; then run whole federations in which one client sends such things."""
    count, round = 10_000 if short else 100_000, Round()
    honest = [round.reply(k) for k in range(HONEST)]
    causes: collections.Counter[str] = collections.Counter()
    for batch in _batches(count):
        replies = [forged(round.reply(HONEST + i % (CLIENTS - HONEST)), random.Random(i)) for i in batch]
        causes += round.judge([*honest, *replies])
    refused = sum(causes.values())
    shown = ", ".join(f"{n:,} {cause}" for cause, n in causes.most_common(6))
    assert 0.5 * count < refused < count, refused
    runs = _whole_runs(short)
    return [
        (f"{count:,} forged uploads and reports", "refused exactly where impossible; merge bit-equal without them",
         f"{refused:,} refused ({shown} …), {count - refused:,} possible and merged; no other error"),
        ("NaN, 1e30, shape, dtype, missing, extra, count \"5\" in whole runs", "that client refused, server bit-equal", runs),
    ]  # fmt: skip


BAD = 2
WAYS: dict[str, dict[str, Any]] = {
    "sync": {"engine": "one"},
    "stacked": {"engine": "stacked"},
    "timed": {"profile": "lognormal:0.5"},
    "fedasync": {"profile": "lognormal:0.5", "mode": "fedasync", "rounds": 8},
    "fedbuff": {"profile": "lognormal:0.5", "mode": "fedbuff", "buffer": 2, "rounds": 8},
    "wait-free": {"profile": "lognormal:0.5", "wait_free": "until-download"},
}
WEIGHT = "fc1.weight"


def _spoilt(new: Callable[[Tensor], Any]) -> Callable[[Reply], Reply]:
    def change(reply: Reply) -> Reply:
        params = reply.up["params"]
        return dataclasses.replace(reply, up={**reply.up, "params": {**params, WEIGHT: new(params[WEIGHT])}})

    return change


def _counting(samples: Any) -> Callable[[Reply], Reply]:
    return lambda reply: dataclasses.replace(reply, report={**reply.report, "samples": samples})


BADNESS: dict[str, Callable[[Reply], Reply]] = {
    "NaN": _spoilt(lambda v: v * math.nan),
    "Inf": _spoilt(lambda v: v * math.inf),
    "1e30": _spoilt(lambda v: v * 0 + 1e30),
    "shape": _spoilt(lambda v: v[:1]),
    "dtype": _spoilt(lambda v: v.half()),
    "missing": lambda reply: dataclasses.replace(reply, up={}),
    "extra": lambda reply: dataclasses.replace(reply, up={**reply.up, "more": {}}),
    **{f"count {n!r}": _counting(n) for n in (0, -9, math.nan, 10**12, "5")},
}


def _whole_runs(short: bool) -> str:
    """Run federations in every mode in which one client is bad in every reply, beside those in which it never answers."""
    from tests.problems import SETTINGS, Tampered, finish, make, ragged

    def end(way: str, change: Callable[[Reply], Reply | None]) -> tuple[fs.Run, tree.Params]:
        settings = Training(**{**SETTINGS, "participation": 1.0, "engine": "one", **WAYS[way]})
        sim = prepare(fs.Ditto(), make("plain"), ragged(), None, settings)
        at = lambda reply: reply.kind == "train" and reply.client == BAD  # noqa: E731
        run = finish(sim, Tampered(lambda reply: change(reply) if at(reply) else reply))
        return run, tree.flatten(run.server)

    kinds = ["1e30", "missing", "count '5'"] if short else list(BADNESS)
    for way in WAYS:
        _, without = end(way, lambda reply: None)
        for kind in kinds:
            run, server = end(way, BADNESS[kind])
            assert set(run.rejected) == {BAD}, (way, kind, run.rejected)
            assert all(torch.equal(server[name], without[name]) for name in without), (way, kind)
            assert "client 2: " in run.table(), (way, kind)
    return f"{len(WAYS) * len(kinds)} runs in {len(WAYS)} modes ({', '.join(WAYS)})"


def wire_section(short: bool) -> list[Row]:
    """Mutate messages as bytes: nothing but `MessageError`, and what can be read passes the driver and the gate."""
    count, round = 10_000 if short else 100_000, Round()
    honest = [round.reply(k) for k in range(HONEST)]
    good = [round.reply(HONEST + k) for k in range(CLIENTS - HONEST)]
    data = [wire.encode(reply) for reply in good]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = gated = strays = 0
    said: list[str] = []
    longest = 0.0
    for batch in _batches(count):
        posted: list[Reply] = []
        for i in batch:
            place = i % len(good)
            changed = mutated(data[place], random.Random(i), data)
            began = time.perf_counter()
            try:
                posted.append(wire.decode(changed, Reply, most=1 << 20))
            except wire.MessageError as error:
                said.append(str(error))
            longest = max(longest, time.perf_counter() - began)
        replies = _driven(round.orders, posted)
        strays += len(posted) - len(replies)
        faults = [reply for reply in replies if reply.fault]
        passed = [reply for reply in replies if not reply.fault and not reply.refusal]
        read += len(passed)
        accepted, reasons = round.inspect([*honest, *faults])
        assert accepted == honest
        assert set(reasons) == {str(reply.client) for reply in faults}
        gated += sum(round.judge([*honest, *passed]).values())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert longest < SLOW, f"a message took {longest:.2f} s"
    assert grown < ROOM, f"{grown:,} bytes more"
    assert not any("\n" in line for line in said)
    unread = len(said)
    assert unread > count / 4
    assert read > count / 50
    figure = f"{unread:,} unreadable, {strays:,} to no order, {gated:,} refused by the gate, {read - gated:,} possible"
    return [(
        f"{count:,} mutated wire messages", "one error type; the sender refused, the others' merge bit-equal",
        f"{figure}; longest {1e3 * longest:.0f} ms, memory grown by {grown / 2**20:.0f} MiB",
    )]  # fmt: skip


class _Post:
    """A transport that has these replies already."""

    seconds = 0.0

    def __init__(self, posted: Sequence[Reply]) -> None:
        self.posted = posted

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Do nothing."""

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Yield them."""
        yield from self.posted

    def alive(self) -> Sequence[int]:
        """Return every client."""
        return range(CLIENTS)


def _driven(orders: Sequence[Order], posted: Sequence[Reply]) -> list[Reply]:
    """Return what the driver makes of replies to these orders."""
    return Driver(_Post(posted)).ask(orders)


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a message with one or two mutations."""
    for _ in range(rng.choice((1, 1, 2))):
        what, at = rng.randrange(11), rng.randrange(max(1, len(data)))
        if what == 0:
            data = data[:at]
        elif what == 1:
            data = data[:at] + rng.randbytes(rng.choice((1, 8, 300))) + data[at:]
        elif what == 2:
            data = data[:at] + data[at + rng.choice((1, 8, 300)) :]
        elif what == 3:
            data = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data)))) + data[8:]
        elif what == 4:
            data = rng.randbytes(rng.randrange(200))
        elif what == 5:
            other = rng.choice(others)
            data = data[:at] + other[rng.randrange(len(other)) :]
        elif what <= 8:
            data = _other_header(data, rng)
        else:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 4))):
                if changed:
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            data = bytes(changed)
    return data


JSONS: tuple[Any, ...] = (
    None, True, 0, 1, -1, 1.5, 2**63, 10**30, "5", "nan", "inf", "train", "score", "", [], {}, [[[[]]]], {"a": {"b": None}},
    {"params": None}, {"loss": "nan"}, "x" * 5000, 1e308,
)  # fmt: skip
FIELDS = ("kind", "round", "client", "up", "report", "run", "refusal", "order", "fault", "down", "more")


def _other_header(data: bytes, rng: random.Random) -> bytes:
    """Return a message with a field, or a number of the report, of its header replaced, left out or added."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        target = header["report"] if rng.random() < 0.5 else header
        name = rng.choice(NUMBERS if target is not header else FIELDS)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError):
        return data
    if rng.random() < 0.2 and isinstance(target, dict):
        target.pop(name, None)
    elif isinstance(target, dict):
        target[name] = rng.choice(JSONS)
    head = json.dumps(header).encode()
    if rng.random() < 0.02:
        head = b'{"up":' * rng.choice((40, 100_000)) + head
    return struct.pack("<Q", len(head)) + head + data[8 + length :]


def overhead(short: bool) -> list[Row]:
    """Measure the gate's share of rounds: its own time and that of the whole round, round by round, in one process."""
    rows = []
    cases: list[tuple[str, fs.Method, dict[str, Any]]] = [
        ("the default run, 20 clients of the digits", fs.PFedSD(), {}),
        ("fedavg, one by one", fs.FedAvg(), {"engine": "one"}),
    ]
    if not short:
        cases += [(TINY, fs.PFedSD(), {"clients": 100})]
        cases += [(SMALLEST, fs.FedAvg(), {"engine": "stacked", "clients": 100})]
    for name, method, changes in cases:
        shares = _shares(fs.Experiment(method=method, rounds=8 if short else 40, device="cpu", **changes))
        share = statistics.median(shares)
        promised = name not in (TINY, SMALLEST)
        assert share <= LATEST or not promised, f"{name}: {share:.1%} of a round"
        outcome = "at most 2 % of a round" if promised else "reported: about half a millisecond of work for each client"
        rows.append((f"the gate in {name}", outcome, f"{share:.2%} (median of {len(shares)} rounds)"))
    return rows


def _shares(experiment: fs.Experiment) -> list[float]:
    """Return for each round but the first the share of its time that the gate took, in processor time: others may run besides."""
    inside: list[float] = []
    spent = 0.0
    originals = {name: getattr(Coordinator, name) for name in ("inspect", "sound")}

    def clocked(check: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            try:
                return check(*arguments, **options)
            finally:
                spent += time.thread_time() - began

        return wrapped

    def note(record: Mapping[str, Any]) -> None:
        nonlocal spent
        inside.append(spent / record["seconds"])
        spent = 0.0

    for name, check in originals.items():
        setattr(Coordinator, name, clocked(check))
    try:
        fs.run(experiment, progress=note)
    finally:
        for name, check in originals.items():
            setattr(Coordinator, name, check)
    return inside[1:]


SECTIONS: dict[str, Callable[[bool], list[Row]]] = {"uploads": uploads, "wire": wire_section, "overhead": overhead}
