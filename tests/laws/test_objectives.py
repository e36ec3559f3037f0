"""The laws for objectives other than classification: a regression, a multi-label and a token problem, under every method.

Methods that need classes refuse the other objectives in one line.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill.core.errors import InputError
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.testing import problems
from fedstill.testing.problems import model

from ..problems import SETTINGS, WIRED, distance, finish, states
from .table import ROWS, Neutral, Row

KINDS = ("regression", "multilabel", "tokens")
federation = functools.cache(problems.federation)


def train(kind: str, method: fs.Method, transport=None, **changes) -> fs.Run:
    settings = {**SETTINGS, "rounds": 2, "engine": "one", **changes}
    prepared = simulation.prepare(method, model(kind), federation(kind), None, Training(**settings))
    return finish(prepared, transport)


DISTILLS = ("pfedsd", "pfedkd-wcl", "fedgkd", "cd2-pfed")  # their variants use the objective in ways of their own
FIRST = {row.method.id: row for row in reversed(ROWS)}
ALLOWED = [row for row in FIRST.values() if not row.method.needs_classes]
REFUSED = [row for row in FIRST.values() if row.method.needs_classes]
VARIANTS = [row for row in ROWS if row not in ALLOWED and row.method.id in DISTILLS]
CASES = [(row, kind) for row in ALLOWED for kind in KINDS]
CASES += [(row, KINDS[i % (2 if row.method.id == "cd2-pfed" else 3)]) for i, row in enumerate(VARIANTS)]


def refused(row: Row, kind: str) -> bool:
    """CD²-pFed divides layers by channels, which an embedding does not have."""
    return kind == "tokens" and isinstance(row.method, fs.CD2PFed)


@pytest.mark.parametrize(("row", "kind"), CASES, ids=lambda v: v.name if isinstance(v, Row) else v)
def test_stacked_through_the_wire_equals_one(row: Row, kind: str) -> None:
    how = {name: value for name, value in row.settings.items() if name != "rounds"}
    if refused(row, kind):
        with pytest.raises(InputError, match="model"):
            train(kind, row.method, **how)
        return
    one, stacked = train(kind, row.method, **how), train(kind, row.method, WIRED, engine="stacked", **how)
    assert stacked.trainer.name == "stacked"
    assert distance(states(one), states(stacked)) < 1e-10
    for a, b in zip(one.history, stacked.history, strict=True):
        assert a.keys() == b.keys()
        pooled = [name for name in a if name.endswith("_pooled")]
        assert pooled
        for name in ("loss", "personal", "personal_sample", *pooled):
            assert a[name] == pytest.approx(b[name], abs=1e-10), name
    start = one.task.net.export(one.task.net.initial())
    moved = {name: value - start[name] for name, value in states(one)["personal 0"].items()}
    assert any(value.abs().max() > 1e-3 for value in moved.values()), "nothing was trained"


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_methods_that_need_classes_say_so_in_one_line(row: Row) -> None:
    name = row.method.id
    with pytest.raises(
        InputError, match=f"objective = 'regression': should be 'classification' with {name}, which"
    ) as e:
        train("regression", row.method)
    assert "\n" not in str(e.value)


def test_which_methods_need_classes() -> None:
    assert {row.method.id for row in REFUSED} == {"fedrod", "fedpac", "fedgen"}


NEUTRAL = [
    (row, law)
    for row in [*ALLOWED, *VARIANTS]
    for law in row.neutral
    if law.parent_model is Neutral.__dataclass_fields__["parent_model"].default
]


@pytest.mark.parametrize(
    ("number", "row", "law"),
    [(i, row, law) for i, (row, law) in enumerate(NEUTRAL)],
    ids=lambda v: v.name if isinstance(v, Row) else v.parent.id if isinstance(v, Neutral) else "",
)
def test_neutral_values_give_the_parent(number: int, row: Row, law: Neutral) -> None:
    """Each law on one of the problems in turn; without dropout and BatchNorm, as the laws of classification."""
    kind = KINDS[number % 3]
    if refused(row, kind):
        kind = "regression"
    settings = {**SETTINGS, "rounds": 2, "epochs": 1, **law.settings, "engine": "stacked" if number % 2 else "one"}
    net = model(kind)
    net.drop.p = 0.0
    if kind != "tokens":
        net.bn = nn.Identity()
    a, b = (fs.simulate(m, model=net, data=federation(kind), **settings) for m in (law.variant, law.parent))
    chosen = [name for name in states(a) if law.of == "both" or name.startswith(law.of)]
    ours, theirs = ({name: states(r)[name] for name in chosen} for r in (a, b))
    assert distance(ours, theirs) <= law.within


@pytest.mark.parametrize(
    "method", [fs.PFedSD(lam=0.4, tau=2.0), fs.FedGKD(gamma=0.5, m=1), fs.PFedKDWCL(alpha=0.2, server="average")]
)
def test_one_client_ends_at_least_squares(method: fs.Method) -> None:
    """There teacher and student agree: what is left is (XᵀX)⁻¹Xᵀy."""
    g = np.random.default_rng(1)
    x = np.linalg.qr(np.column_stack([np.ones(12), g.normal(size=(12, 3))]))[0][:, 1:] * np.sqrt(12)  # XᵀX = 12·I
    y = g.normal(size=(12, 2))
    fed = fs.Federation.from_arrays([(x, y, x, y)])
    run = fs.simulate(
        method, model=nn.Linear(3, 2, dtype=torch.float64), data=fed, rounds=40, epochs=4, batch_size=12, lr=0.3,
        momentum=0.0, dtype="float64", engine="one", eval_every=40,
    )  # fmt: skip
    design = np.column_stack([x, np.ones(12)])
    right = np.linalg.lstsq(design, y, rcond=None)[0]
    state = run.personal(0)
    assert np.abs(np.vstack([state["weight"].numpy().T, state["bias"].numpy()]) - right).max() < 1e-8
    off = np.abs(design @ right - y)
    assert run.history[-1]["personal"] == pytest.approx(off.mean(), abs=1e-8)
    assert run.history[-1]["metric"] == "mae"


@pytest.mark.parametrize("kind", ["regression", "tokens"])
def test_a_traced_program_and_a_cohort_of_one_equal_one(kind: str, traced) -> None:
    how = {"participation": 1.0}
    together = train(kind, fs.PFedSD(lam=0.5), **how)
    program = train(kind, fs.PFedSD(lam=0.5), engine="stacked", **how)
    assert all(program.trainer.engine.programs.stages.values())
    assert distance(states(together), states(program)) < 1e-10
    alone = train(kind, fs.PFedSD(lam=0.5), engine="stacked", cohort=1, compile="off", **how)
    assert distance(states(together), states(alone)) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_dp_sgd_stacked_equals_one(kind: str) -> None:
    net = model(kind)
    if kind != "tokens":
        net.bn = nn.Identity()
    private = {**SETTINGS, "rounds": 2, "privacy": "local", "clip_norm": 0.5, "noise_multiplier": 0.7}
    a, b = (
        fs.simulate(fs.FedAvg(), model=net, data=federation(kind), **private, engine=engine)
        for engine in ("one", "stacked")
    )
    assert distance(states(a), states(b)) < 1e-10
    assert a.history[-1]["epsilon"] > 0
