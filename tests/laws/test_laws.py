"""Every method under every law (the list is in the project's style guide): one row in `table.py`, all of these tests."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedstill as fs
from fedstill.engine import fused
from fedstill.nn.kernels import winograd
from fedstill.testing import laws
from fedstill.testing.laws import Problem

from ..problems import (
    EAGER,
    MODELS,
    SETTINGS,
    distance,
    make,
    on_quadratics,
    point,
    ragged,
    run,
    states,
)
from .table import OPTIMUM, ROWS, Neutral, Row, mean_of_pulls, own_optimum

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def problem(row: Row, model: str, data: fs.Federation | None = None) -> Problem:
    """The shared problem with a row's settings."""
    return Problem(make(model), data or ragged(), {**SETTINGS, **row.settings})


@every_row
@pytest.mark.parametrize("model", MODELS)
def test_1_stacked_equals_one(row: Row, model: str) -> None:
    laws.stacked_equals_one(problem(row, model), row.method, moves=1e-3)


# Tracing takes a second or two, so each method and variant has one of the two models that ask most of a program.
TRACED = [(row, ("normed", "convolved")[i % 2]) for i, row in enumerate(ROWS)]


def asks_for_the_round(method: fs.Method) -> bool:
    """L2GD draws how long a round is, so its phases differ from round to round: they are not traced."""
    return isinstance(method, fs.L2GD)


@pytest.mark.parametrize(("row", "model"), TRACED, ids=lambda v: v.name if isinstance(v, Row) else v)
def test_1_a_traced_program_equals_one(row: Row, model: str, traced, capsys) -> None:
    how = {
        "participation": 0.4,
        "rounds": 2,
        **row.settings,
    }  # two clients of five: a program for two rows, and one for one
    one, program = run(row.method, model, engine="one", **how), run(row.method, model, engine="stacked", **how)
    assert distance(states(one), states(program)) < 1e-10
    for a, b in zip(one.history, program.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
        assert a["personal_clients"] == b["personal_clients"]
    stages = list(program.trainer.engine.programs.stages.values())
    assert stages
    assert all((arena is None) == asks_for_the_round(row.method) for arena in stages)
    assert capsys.readouterr().err == ""  # nothing fell back


class Chain(nn.Module):
    """What has a training loop of its own (`engine/fused.py`)."""

    head_modules = "fc2"

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Pooled(nn.Module):
    """ReLU before max-pooling (`pool_first.py`) after 5×5 convolutions (`winograd.py`)."""

    head_modules = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 5, padding=4), nn.Conv2d(3, 4, 5, padding=3)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x.reshape(-1, 1, 2, 2))), 2)
        return self.fc(F.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1))


CLOSED = ("fedavg", "local", "fedrep", "fedprox", "fedgkd", "pfedsd", "pfedkd-wcl", "pfedme", "per-fedavg")
"""Methods that a chain's own loop trains by default."""


@every_row
@pytest.mark.parametrize("model", [Chain, Pooled])
def test_1_fast_paths_on_and_off(row: Row, model: type[nn.Module], monkeypatch) -> None:
    """Clients one by one: by the loops and convolutions that are faster, and without them."""
    used: list[str] = []
    for owner, name in ((winograd, "conv2d"), (fused.Perceptron, "train")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, f=plain, n=name: used.append(n) or f(*a))
    torch.manual_seed(5)
    net = model().double()

    def trained(**changes) -> fs.Run:
        return run(row.method, net, workers=1, **row.settings, **changes)

    off = trained(fast=False)
    assert used == []
    on = trained(trainer={"tuning": EAGER})
    assert distance(states(on), states(off)) < 1e-10
    assert [r["loss"] for r in on.history] == pytest.approx([r["loss"] for r in off.history], abs=1e-10)
    assert [r["personal_clients"] for r in on.history] == [r["personal_clients"] for r in off.history]
    if model is Pooled:
        assert "conv2d" in used
        assert set(on.trainer.bench.task.net._rewritten) == {True, False}
    else:
        assert row.method.id not in CLOSED or row.name != row.method.id or "train" in used


@every_row
def test_2_the_wire_changes_nothing(row: Row) -> None:
    laws.wire_changes_nothing(problem(row, "normed"), row.method)


NEUTRAL = [(row, law) for row in ROWS for law in row.neutral]


@pytest.mark.parametrize(("row", "law"), NEUTRAL, ids=lambda v: v.name if isinstance(v, Row) else v.parent.id)
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_3_neutral_values_give_the_parent(row: Row, law: Neutral, engine: str) -> None:
    settings = {**SETTINGS, **law.settings}
    ours, theirs = (Problem(module, ragged(), settings) for module in (make("plain"), law.parent_model(make("plain"))))
    laws.neutral_gives_parent(ours, law.variant, law.parent, law.of, law.within, theirs, engine)


@every_row
def test_4_fixed_point(row: Row) -> None:
    row.fixed_point(row.method)


def test_4_scaffold_finds_the_optimum_where_fedavg_does_not() -> None:
    weights = (1.0, 1.0, 1.0)
    bias = abs(mean_of_pulls(0.0, weights) - OPTIMUM)
    assert bias > 0.05  # by algebra, FedAvg must miss
    fedavg, scaffold = on_quadratics(fs.FedAvg(mean="uniform")), on_quadratics(fs.SCAFFOLD())
    assert abs(point(fedavg.generic()) - OPTIMUM) == pytest.approx(bias, abs=1e-9)
    assert abs(point(scaffold.generic()) - OPTIMUM) < 1e-9


def several(row: Row) -> Problem:
    """Nobody has one sample alone: BatchNorm would turn it into zeros, so that private statistics are shared biases."""
    return problem(row, "normed", ragged(((13, 5), (7, 3), (6, 2), (10, 4), (5, 1))))


@every_row
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_5_private_stays_private(row: Row, engine: str) -> None:
    findings = laws.given_away(several(row), row.method, engine)
    assert findings == [[]] * 15  # three rounds of five clients


LEAKS = {  # of the private head h, from h before and after the round and from what all begin with
    "itself": lambda h, old, start: h,
    "an earlier one": lambda h, old, start: old,
    "its way since the beginning": lambda h, old, start: h - start,
    "its way in this round": lambda h, old, start: old - h,
    "scaled and shifted": lambda h, old, start: 1.5 - 0.25 * h,
    "mixed": lambda h, old, start: 0.3 * h + 0.6 * old + 0.1 * start,
    "in another shape": lambda h, old, start: (h - start).flatten(),
}


OF_THREE = [leak for leak in LEAKS if leak not in ("scaled and shifted", "mixed")]  # three numbers are such of anything
CASES = [*((leak, "head.0.weight") for leak in LEAKS), *((leak, "head.3.bias") for leak in OF_THREE)]


@pytest.mark.parametrize(("leak", "of"), CASES)
def test_5_finds_a_method_that_leaks(leak: str, of: str) -> None:
    start = make("normed").state_dict()[of]

    class Leaky(fs.FedPer):
        def finish(self, task, down, memory, local):
            up, new_memory = super().finish(task, down, memory, local)
            return {**up, "statistics": LEAKS[leak](local["params"][of], memory[of], start)}, new_memory

    findings = laws.given_away(several(Row(Leaky(), own_optimum)), Leaky(), "one")
    caught = [lines == [f"statistics ← {of}"] for lines in findings]
    assert all(caught[5:] if leak == "an earlier one" else caught)  # the first one is what everybody has


@every_row
def test_6_cohorts_and_padding_are_invisible(row: Row) -> None:
    laws.cohorts_are_invisible(problem(row, "normed"), row.method)
    laws.cohorts_are_invisible(problem(row, "plain"), row.method)


@every_row
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_7_same_seed_same_bits_and_evaluation_changes_nothing(row: Row, engine: str) -> None:
    laws.same_seed_same_bits(problem(row, "normed"), row.method, engine)


@every_row
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_8_nothing_aliases(row: Row, engine: str) -> None:
    laws.nothing_aliases(problem(row, "normed"), row.method, engine)


@every_row
def test_9_the_order_of_uploads_is_invisible(row: Row) -> None:
    laws.uploads_in_any_order(problem(row, "normed"), row.method)
