"""A hub and sites as real processes, and what happens to them: kills at random moments, stops, many sites.

Needs the extra deploy. The suite has shorter forms of these in tests/system/test_deploy.py; each section takes minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core import tree
from fedstill.data import Federation
from fedstill.deploy import keeper
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal

if importlib.util.find_spec("nvflare") is not None:  # else the first section that is run says what is missing
    from deploy_troubles import Proxy, joined, process_of, slowed

    from fedstill.deploy import demo, jobs, process
    from fedstill.deploy.process import Settings

Row = tuple[str, str, str]
HELD: dict[str, Any] = {"dtype": "float64", "lr": 0.05, "momentum": 0.9}


def federation(sites: int, features: int = 6) -> Federation:
    rng = np.random.default_rng(0)
    centres, clients = rng.normal(size=(4, features)), []
    for k in range(sites):
        y = rng.integers(0, 4, 40 + 9 * (k % 3))
        x = (centres[y] * (1 + k % 3) + rng.normal(size=(len(y), features))).astype(np.float32)
        clients.append((x[:-12], y[:-12], x[-12:], y[-12:]))
    return Federation.from_arrays(clients, classes=4)


def experiment(method: str, **changed: Any) -> Experiment:
    return Experiment(method=METHODS[method](), **{**HELD, **changed})


def end_of(job: Path) -> dict[str, torch.Tensor]:
    checkpoint = Journal(job / jobs.RUN).load(torch.device("cpu"))
    assert checkpoint is not None
    return dict(tree.leaves(checkpoint.state()["server"]))


def carried_out(party: demo.Party, job: Path, kills: Sequence[tuple[int, float, str]] = ()) -> list[dict[str, Any]]:
    """Wait for a job; so many seconds after a round is over, or after its start, kill these, one after another."""
    began, left, seen = time.monotonic(), sorted(kills), {0: time.monotonic()}
    metrics = job / jobs.RUN / "metrics.jsonl"
    while not (job / jobs.OUTCOME).exists():
        for round in range(1, len(metrics.read_text().splitlines()) + 1 if metrics.exists() else 1):
            seen.setdefault(round, time.monotonic())
        while left and left[0][0] in seen and time.monotonic() - seen[left[0][0]] > left[0][1]:
            os.kill(process_of(party.folder / left.pop(0)[2]), signal.SIGKILL)
        assert time.monotonic() - began < 900, "the run did not end"
        time.sleep(0.01)
    assert not left, f"the run was over before {left}"
    return list(jobs.follow(job, lambda: True))


def moments(draw: random.Random, rounds: int, each: float, whom: Sequence[str]) -> list[tuple[int, float, str]]:
    """Return a moment for each kill: within rounds that are drawn, none of them twice."""
    within = sorted(draw.sample(range(rounds - 1), len(whom)))
    return [(round, draw.uniform(0.0, 0.8 * each), who) for round, who in zip(within, whom, strict=True)]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def kills(short: bool) -> list[Row]:
    """The hub is killed at random moments of a run, then sites are, then both."""
    draw, rows = random.Random(0), []
    names = ("a", "b", "c")
    with demo.party(federation(3), names) as party:
        for method in ("scaffold",) if short else ("scaffold", "pfedsd"):
            whole = experiment(method, rounds=6 if short else 12, epochs=60)
            undisturbed = jobs.submit(party.hub, whole, names)
            history = carried_out(party, undisturbed)
            length = sum(record["seconds"] for record in history)
            for who, times in (("hub", 2 if short else 5), ("site", 2 if short else 5)):
                whom = ["hub" if who == "hub" else draw.choice(names) for _ in range(times)]
                at = moments(draw, whole.rounds, length / whole.rounds, whom)
                job = jobs.submit(party.hub, whole, names)
                again = carried_out(party, job, at)
                assert same(end_of(undisturbed), end_of(job)), f"{method}: other bits after kills {at}"
                assert [r["participants"] for r in again] == [[0, 1, 2]] * whole.rounds
                assert [r["personal_clients"] for r in again] == [r["personal_clients"] for r in history]
                fault = f"{method}: kill -9 of the {who}, {times} times at random"
                rows.append((fault, "the same bits, nothing counted twice", f"{whole.rounds} rounds"))
    return rows


def hang(short: bool) -> list[Row]:
    """A site is stopped in the middle of a run with a deadline, as by a hang or a cut network, and goes on later."""
    names = ("a", "b", "c")
    with demo.party(federation(3), names) as party:
        job = jobs.submit(party.hub, experiment("pfedsd", rounds=12, epochs=60), names, deadline=4.0)
        metrics = job / jobs.RUN / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.05)
        stopped = process_of(party.folder / "b")
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(10.0 if short else 30.0)
        os.kill(stopped, signal.SIGCONT)
        history = carried_out(party, job)
    away = [r["round"] for r in history if r["missing"] == [1]]
    assert away, "nobody noticed"
    assert history[-1]["participants"] == [0, 1, 2], "it did not come back"
    longest = max(r["seconds"] for r in history)
    assert longest < 4.0 * 3 + 5, longest
    fault = f"a site stopped for {10 if short else 30} s, deadline 4 s"
    return [(fault, f"rounds {away} without it, then back", f"longest round {longest:.1f} s")]


def halfway(short: bool) -> list[Row]:
    """A site's process is killed at random moments within rounds of many epochs, kept after each; it goes on from there."""
    names, draw, rows = ("a", "b", "c"), random.Random(2), []
    with demo.party(federation(3), names) as party:
        for name in names:
            Settings(str((party.folder / f"{name}.npz").absolute()), device="cpu", save_every_epochs=1).write(
                party.folder / name
            )
            party.stop(name)
            party.start(name)
        party.wait(*names)
        work = {"rounds": 2 if short else 4, "epochs": 300, "batch_size": 2, "fast": False, "lr": 0.002}
        for method in ("scaffold",) if short else ("scaffold", "pfedsd", "fedrep", "spectral"):
            whole = experiment(method, **work)
            undisturbed = jobs.submit(party.hub, whole, names)
            length = sum(record["seconds"] for record in carried_out(party, undisturbed))
            whom = [draw.choice(names) for _ in range(1 if short else 3)]
            at = moments(draw, whole.rounds, length / whole.rounds, whom)
            job = jobs.submit(party.hub, whole, names)
            carried_out(party, job, at)
            assert same(end_of(undisturbed), end_of(job)), f"{method}: other bits after kills {at}"
        for name in names:
            log = (party.folder / name / keeper.LOG).read_text(errors="replace")
            rows += [("", line.strip(), name) for line in log.splitlines() if ": goes on after step" in line]
    assert rows, "no round was gone on with"
    fault = f"kill -9 of sites within rounds, {1 if short else 12} times at random"
    return [(fault, "the same bits", f"{len(rows)} rounds gone on with from their last epoch")]


def network(short: bool) -> list[Row]:
    """The network of one site is cut in the middle of a run, without and with a deadline, and healed."""
    names, seconds, rows = ("a", "b", "p"), 5.0 if short else 30.0, []
    with demo.party(federation(3), ("a", "b", "c")) as party:
        proxy = Proxy(party.hub.port)
        joined(party, "p", proxy.port, "c")
        try:
            calm = jobs.submit(party.hub, experiment("scaffold", rounds=10, epochs=60), names)
            carried_out(party, calm)
            for deadline in (0.0, 4.0):
                # with a deadline rounds go on without it: there must be enough for it to be back before the end
                rounds = 10 if not deadline else 40 if short else 60
                whole = experiment("scaffold", rounds=rounds, epochs=60)
                job = jobs.submit(party.hub, whole, names, deadline=deadline)
                metrics = job / jobs.RUN / "metrics.jsonl"
                while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
                    time.sleep(0.02)
                proxy.cut()
                time.sleep(seconds)
                proxy.heal()
                healed = time.monotonic()
                before = len(metrics.read_text().splitlines())
                history = carried_out(party, job)
                away = [r["round"] for r in history if r["missing"]]
                if not deadline:
                    assert not away
                    assert same(end_of(calm), end_of(job)), "other bits after a cut"
                    figure = f"over {time.monotonic() - healed:.1f} s after it was healed"
                    rows.append(
                        (f"network of a site cut for {seconds:.0f} s, no deadline", "waited for, the same bits", figure)
                    )
                    continue
                back = next(r["round"] for r in history if r["round"] > before and not r["missing"])
                assert history[-1]["participants"] == [0, 1, 2]
                took = sum(r["seconds"] for r in history[before : back - 1])
                figure = f"{len(away)} rounds without it, counted again after {took:.1f} s"
                rows.append(
                    (
                        f"network of a site cut for {seconds:.0f} s, deadline {deadline:.0f} s",
                        "missed, then back",
                        figure,
                    )
                )
        finally:
            process.stop(party.folder / "p")
            proxy.close()
    return rows


def slow(short: bool) -> list[Row]:
    """A site gets a twentieth of its processor."""
    names, rows = ("a", "b", "c"), []
    rounds = 2 if short else 5
    with demo.party(federation(3), names) as party:
        for deadline in (0.0, 4.0):
            quick = experiment("pfedsd", rounds=rounds, epochs=60, batch_size=2, lr=0.002, fast=False)
            with slowed(process_of(party.folder / "c"), 20):
                job = jobs.submit(party.hub, quick, names, deadline=deadline)
                metrics = job / jobs.RUN / "metrics.jsonl"
                began = time.monotonic()
                while not (job / jobs.OUTCOME).exists():
                    assert time.monotonic() - began < 600
                    time.sleep(0.05)
            history = [json.loads(line) for line in metrics.read_text().splitlines()]
            wanted = [0, 1] if deadline else [0, 1, 2]
            assert [r["participants"] for r in history] == [wanted] * rounds, history
            each = statistics.median(r["seconds"] for r in history)
            outcome = "missed, the others count" if deadline else "waited for, counts in every round"
            fault = f"a site 20 times slower, {f'deadline {deadline:.0f} s' if deadline else 'no deadline'}"
            rows.append((fault, outcome, f"median round {each:.1f} s"))
    return rows


def many(short: bool) -> list[Row]:
    """Many sites on one machine; two are killed at random moments."""
    count, rounds = (6, 6) if short else (20, 20)
    names = [f"s{k:02d}" for k in range(count)]
    draw = random.Random(1)
    with demo.party(federation(count), names) as party:
        whole = experiment("pfedsd", rounds=rounds, model="mlr")
        undisturbed = jobs.submit(party.hub, whole, names)
        history = carried_out(party, undisturbed)
        job = jobs.submit(party.hub, whole, names)
        length = sum(r["seconds"] for r in history)
        at = moments(draw, rounds, length / rounds, draw.sample(names, 2))
        again = carried_out(party, job, at)
        assert same(end_of(undisturbed), end_of(job))
        assert all(len(r["participants"]) == count for r in again)
    each = statistics.median(r["seconds"] for r in history)
    return [
        (f"{count} sites, {rounds} rounds, two killed at random", "the same bits, full roster", f"{each:.2f} s a round")
    ]


def overhead(short: bool) -> list[Row]:
    """What a round trip of 2 MB costs with three sites."""
    names = ("a", "b", "c")
    data = federation(3, features=4000)
    fast = {"rounds": 10 if short else 40, "epochs": 1, "eval_every": 100, "dtype": "float32"}
    with demo.party(data, names) as party:
        history = carried_out(party, jobs.submit(party.hub, experiment("fedavg", **fast), names))
    each = statistics.median(r["seconds"] for r in history[1:])
    size = history[1]["bytes_down"]
    assert each < 0.5, each
    return [(f"a round of 3 sites, {size / 1e6:.2f} MB down and up", "at most 0.5 s", f"median {each:.3f} s")]


SECTIONS = {
    "deploy-kills": kills,
    "deploy-halfway": halfway,
    "deploy-hang": hang,
    "deploy-network": network,
    "deploy-slow": slow,
    "deploy-many": many,
    "deploy-overhead": overhead,
}
