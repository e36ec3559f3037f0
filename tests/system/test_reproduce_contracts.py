"""Every kind of number that a table or figure holds, from a run to the cell, against the number by hand from the run's files.

The oracle reads the run's folder as text (metrics.jsonl, scores) and knows nothing of `reproduce.score` or `run.evaluate`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedstill import papers
from fedstill.papers.parse import parsed
from fedstill.reproduce.plan import plan
from fedstill.reproduce.reading import read
from fedstill.reproduce.runner import Runner
from fedstill.reproduce.shelf import Shelf
from fedstill.reproduce.store import Store

TINY = {
    "data": "digits", "model": "mlp", "clients": 6, "participation": 0.5, "rounds": 3, "epochs": 1, "batch_size": 32,
    "lr": 0.1, "partition": "dirichlet:0.5", "split": "80/20", "pool": "all", "head": [], "workers": 1, "engine": "one",
}  # fmt: skip


class Quiet:
    """Follows a reproduction in which nothing may fail."""

    def begin(self, members):
        pass

    def step(self, member, record):
        pass

    def end(self, member, result, reason):
        assert not reason, reason


def reproduced(out, paper, rows, seeds=1, **variant):
    """Run an exhibit of one column at a tiny size; return its readings by row."""
    table = {
        "title": "tiny", "where": "here", "columns": [{"label": "c"}], "setting": SETTINGS[paper],
        "variant": {**TINY, **variant},
        "rows": [{"label": label, "id": label, **row} for label, row in rows.items()],
    }  # fmt: skip
    (exhibit,) = parsed(paper, {"tiny": table}, papers.load(paper)["reported"]).values()
    planned, shelf = plan([exhibit], seeds=seeds), Shelf()
    store = Store(out, lambda source: shelf.checksum(source, ""))
    assert not planned.refused
    runner = Runner(planned, store, shelf, "", "test", Quiet())
    runner.run()
    return {r.cell.row: r for r in read(planned, store, shelf, "", runner.reasons)[exhibit.name]}


SETTINGS = {"pfedsd": "fmnist-dirichlet-20", "spectral": "cifar10-alpha-1", "cd2-pfed": "cifar10-s2"}


def records(out, reading, seed=0):
    """Return the records of a run, as they lie in its folder."""
    (result,) = [result for result in reading.results if result.seed == seed]
    return [json.loads(line) for line in (out / "runs" / result.folder / "metrics.jsonl").read_text().splitlines()]


def sealed(out, reading):
    """Return what the run's result says beside its records."""
    return json.loads((out / "runs" / reading.results[0].folder / "result.json").read_text())


def by_client(record, key, weights=None):
    """Return the mean over clients of a record's rates, in per cent."""
    rates = record[key]
    weight = {k: 1 for k in rates} if weights is None else weights
    return 100 * sum(weight[k] * rates[k] for k in rates) / sum(weight[k] for k in rates)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return the first paper's kinds of numbers, of two methods and two seeds."""
    out = tmp_path_factory.mktemp("first")
    against = {"method": "fedper"}
    rows = {
        "accuracy": {},
        "fedper": {"method": "fedper"},
        "rounds": {"contract": {"metric": "rounds-to-target", "target": 30.0}},
        "speed-up": {"contract": {"metric": "rounds-speedup", "reference": against, "target": 30.0}},
        "improvement": {"contract": {"metric": "improvement", "reference": against}},
        "std": {"contract": {"metric": "client-std"}},
        "each": {"contract": {"metric": "client-accuracies"}},
        "before": {"contract": {"metric": "forgetting", "part": "downloaded", "clients": "participants"}},
        "after": {"contract": {"metric": "forgetting", "part": "trained", "clients": "participants"}},
        "seconds": {"contract": {"metric": "seconds"}},
        "server": {"contract": {"metric": "time-share", "part": "server"}},
        "client": {"contract": {"metric": "time-share", "part": "client"}},
        "communication": {"contract": {"metric": "time-share", "part": "communication"}},
        "numbers": {"contract": {"metric": "megabytes", "part": "numbers"}},
        "multiply-adds": {"contract": {"metric": "flops", "part": "multiply-adds"}},
        "loss": {"contract": {"metric": "loss", "round": 2}},
        "one client": {"contract": {"clients": 3, "round": 2}},
        "by sample": {"contract": {"mean": "sample", "round": "mean10"}},
    }  # fmt: skip
    return out, reproduced(out, "pfedsd", rows, seeds=2)


def values(first, row):
    return list(first[1][row].values)


def of_seeds(first, row, take):
    out, readings = first
    return [take(records(out, readings[row], seed)) for seed in (0, 1)]


def test_accuracies(first):
    assert values(first, "accuracy") == pytest.approx(
        of_seeds(first, "accuracy", lambda h: by_client(h[-1], "personal_clients"))
    )
    assert values(first, "one client") == pytest.approx(
        of_seeds(first, "one client", lambda h: 100 * h[1]["personal_clients"]["3"])
    )
    assert values(first, "by sample") == pytest.approx(
        of_seeds(first, "by sample", lambda h: np.mean([by_client(r, "personal_clients", r["samples"]) for r in h]))
    )


def test_what_is_relative(first):
    def reached(history):
        return next(r["round"] for r in history if by_client(r, "personal_clients") >= 30)

    ours, other = of_seeds(first, "rounds", reached), of_seeds(first, "fedper", reached)
    assert values(first, "rounds") == ours
    assert values(first, "speed-up") == pytest.approx([b / a for a, b in zip(ours, other, strict=True)])
    a, b = values(first, "accuracy"), values(first, "fedper")
    assert values(first, "improvement") == pytest.approx([100 * (x - y) / y for x, y in zip(a, b, strict=True)])


def test_spread_over_clients(first):
    rates = of_seeds(first, "std", lambda h: np.array(list(h[-1]["personal_clients"].values())))
    deviations = [100 * float(np.sqrt(np.mean((r - r.mean()) ** 2))) for r in rates]
    assert values(first, "std") == pytest.approx(deviations)
    assert sorted(first[1]["each"].distribution) == pytest.approx(sorted(100 * np.concatenate(rates)))


def test_forgetting(first):
    """Fig. 2 of the first paper: "the received global model and the last round local trained model", of the same clients."""
    before, after = (dict(first[1][row].curves[0]) for row in ("before", "after"))
    history = of_seeds(first, "before", list)[0]
    known = {}  # by client, the accuracy with which it last ended its training
    for record in history:
        again = [k for k in map(str, record["participants"]) if k in known]
        assert (record["round"] in before) == (record["round"] in after) == bool(again)
        if again:
            assert after[record["round"]] == pytest.approx(100 * np.mean([known[k] for k in again]))
            assert before[record["round"]] == pytest.approx(
                100 * np.mean([record["downloaded_clients"][k] for k in again])
            )
            assert after[record["round"]] - before[record["round"]] == pytest.approx(100 * record["forgetting"])
        known |= record["trained_clients"]
    assert after


def test_seconds_and_their_shares(first):
    out, readings = first
    totals = [values(first, row) for row in ("communication", "client", "server")]
    assert np.sum(totals, axis=0) == pytest.approx([100, 100])
    for seed, seconds in enumerate(values(first, "seconds")):
        history = records(out, readings["seconds"], seed)
        assert 0 < seconds <= np.mean([r["seconds"] for r in history]) * 1.01


def test_amounts(first):
    """A participant moves all numbers down and up; a step is three passes of one multiply-add a weight and sample."""
    import fedstill as fs

    out, readings = first
    net = fs.models.build("mlp", (1, 8, 8), 10, 0)
    weights = sum(p.numel() for p in net.parameters())
    assert values(first, "numbers") == pytest.approx([2 * weights / 1e6] * 2)
    products = sum(p.numel() for p in net.parameters() if p.ndim == 2)
    for result, got in zip(readings["multiply-adds"].results, values(first, "multiply-adds"), strict=True):
        kept = json.loads((out / "runs" / result.folder / "result.json").read_text())
        samples = kept["cost"]["samples"]
        # the past model's predictions are one more forward pass over the client's samples, made once
        assert got == pytest.approx((3 * products * samples + products * samples) / 1e9, rel=0.02)


def test_losses(first):
    assert values(first, "loss") == pytest.approx(of_seeds(first, "loss", lambda h: h[1]["train_loss"]))


def test_further_scores(tmp_path):
    """New, averaged: the last and the best by round; fine-tuned; FedBABU's PM (fine-tuned, weighted by n_i); newcomers."""
    further = {"metric": "accuracy"}
    best = {**further, "round": "best-test"}
    babu = {"method": "fedbabu", "variant": {"fine_tune": 1}}
    pm = {"model": "fine-tuned", "mean": "training", "round": "last"}
    rows = {
        "new": {"method": "ditto", "contract": {**further, "model": "new"}},
        "new, best": {"method": "ditto", "contract": {**best, "model": "new"}},
        "averaged, best": {"method": "fedrep", "contract": {**best, "model": "averaged"}},
        "PM": {"method": "ditto", "contract": {**best, "mean": "training"}},
        "tuned": {**babu, "contract": pm},
        "newcomers": {
            "method": "ditto", "contract": {**further, "model": "newcomers", "mean": "training"},
            "variant": {"newcomers": 2, "join_epochs": 1},
        },
    }  # fmt: skip
    readings = reproduced(tmp_path, "spectral", rows)
    history = records(tmp_path, readings["PM"])

    def value(row):
        (number,) = readings[row].values
        return number

    heads = records(tmp_path, readings["averaged, best"])
    assert all("new" in record for record in history)
    assert all("averaged" in record for record in heads)
    assert value("new") == pytest.approx(100 * history[-1]["new"])
    assert value("new, best") == pytest.approx(100 * max(record["new"] for record in history))
    assert value("averaged, best") == pytest.approx(100 * max(record["averaged"] for record in heads))
    assert value("PM") == pytest.approx(max(by_client(r, "personal_clients", r["train_samples"]) for r in history))
    tuned = sealed(tmp_path, readings["tuned"])["after"]["fine_tuned_clients"]
    sizes = records(tmp_path, readings["tuned"])[-1]["train_samples"]
    assert value("tuned") == pytest.approx(100 * sum(sizes[k] * tuned[k] for k in tuned) / sum(sizes[k] for k in tuned))
    after = sealed(tmp_path, readings["newcomers"])["after"]
    assert value("newcomers") == pytest.approx(100 * after["newcomers_after"])
    assert len(records(tmp_path, readings["newcomers"])[-1]["personal_clients"]) == 4  # of six clients two join later


def test_simulated_speed_up(tmp_path):
    """Wait-free rounds against waiting ones: the reference's seconds to the target divided by ours."""
    contract = {"metric": "time-speedup", "target": 20.0, "mean": "training", "reference": {"wait_free": "off"}}
    shared = {"profile": "lognormal:0.5", "participation": 1.0}
    rows = {
        "ours": {"contract": contract, "variant": {**shared, "wait_free": "until-download"}},
        "waiting": {"contract": {"mean": "training"}, "variant": {**shared, "wait_free": "off"}},
    }
    readings = reproduced(tmp_path, "spectral", rows)

    def reached(row):
        history = records(tmp_path, readings[row])
        return next(r["time"] for r in history if by_client(r, "personal_clients", r["train_samples"]) >= 20)

    assert readings["ours"].values == pytest.approx((reached("waiting") / reached("ours"),))
