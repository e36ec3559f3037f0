"""The laws for a method of one's own in one call: what obeys passes, and each way of breaking a law is caught by that law."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstill as fs
from fedstill import testing
from fedstill.cli import main
from fedstill.core import own, tree
from fedstill.engine import rehearsal
from fedstill.methods import METHODS
from fedstill.testing import laws, problems
from fedstill.testing.laws import Broken, Problem

from ..problems import make, ragged


def problem(model: str = "normed", **settings) -> Problem:
    return Problem(make(model), ragged(), {**problems.SETTINGS, **settings})


def frozen(kind: type) -> type[fs.Method]:
    return dataclass(frozen=True, kw_only=True)(kind)


# ---- methods that break a law ------------------------------------------------------------------------------------------------
@frozen
class Unmasked(fs.FedAvg):
    """A mean over padding: a stack's batches are padded, a single client's are not."""

    def loss(self, task, params, local, batch):
        return F.cross_entropy(task.logits(params, batch), batch.y)


@frozen
class Padded(fs.FedAvg):
    """It asks how many rows it is given, padding included, and so how large others of its cohort are."""

    def finish(self, task, down, memory, local):
        rows = task.here().index.shape[-1]
        return {"params": {name: value * (1 + 0.01 * rows) for name, value in local["params"].items()}}, memory


@frozen
class Marked(fs.FedAvg):
    """It marks what it sends by an attribute, which no wire carries."""

    def send(self, task, server, client):
        down = tree.clone({"params": server["params"]})
        for value in down["params"].values():
            value.fresh = True
        return down

    def begin(self, task, down, memory):
        scale = 1.0 if all(hasattr(value, "fresh") for value in down["params"].values()) else 0.5
        return {"params": {n: v * scale if v.is_floating_point() else v for n, v in down["params"].items()}}


@frozen
class Almost(fs.FedProx):
    """A term that does not vanish where its weight does."""

    def loss(self, task, params, local, batch):
        far = tree.square_norm(tree.sub(task.trainable(params), task.trainable(local["anchor"])))
        return self.fit(task, params, batch) + (self.mu + 1e-6) * far

    def begin(self, task, down, memory):
        return {"params": down["params"], "anchor": {n: 0.9 * v for n, v in task.trainable(down["params"]).items()}}


@frozen
class Leaky(fs.FedPer):
    """The private head goes up under another name, scaled."""

    def finish(self, task, down, memory, local):
        up, kept = super().finish(task, down, memory, local)
        return {**up, "statistics": 2 * local["params"]["head.0.weight"] + 1}, kept


@frozen
class Counting(fs.FedAvg):
    """State in the class: how many rounds were merged, whoever's they were."""

    merged: ClassVar[list[int]] = []

    def merge(self, task, server, uploads):
        self.merged.append(task.round)
        after = super().merge(task, server, uploads)
        return {**after, "params": {n: v * (1 + 0.001 * len(self.merged)) for n, v in after["params"].items()}}


@frozen
class Remembering(fs.FedAvg):
    """State in self, past the frozen dataclass."""

    def merge(self, task, server, uploads):
        after = super().merge(task, server, uploads)
        before = getattr(self, "before", after)
        object.__setattr__(self, "before", after)
        return {**after, "params": {n: (v + before["params"][n]) / 2 for n, v in after["params"].items()}}


@frozen
class Coin(fs.FedAvg):
    """A coin of the global generator, tossed at the server."""

    def merge(self, task, server, uploads):
        after = super().merge(task, server, uploads)
        noise = float(torch.rand(()))
        return {**after, "params": {n: v + noise for n, v in after["params"].items()}}


@frozen
class NumpyCoin(fs.FedAvg):
    """The same with numpy's."""

    def merge(self, task, server, uploads):
        np.random.random()
        return super().merge(task, server, uploads)


@frozen
class Winner(fs.FedAvg):
    """The server keeps an upload itself, not a copy."""

    def merge(self, task, server, uploads):
        return {"params": uploads[0].tree["params"]}


@frozen
class ByPlace(fs.FedAvg):
    """Weights by an upload's place in the list."""

    def merge(self, task, server, uploads):
        weights = [1.0 + place for place, _ in enumerate(uploads)]
        mean = task.average([upload.params for upload in uploads], weights, server["params"])
        return {**server, "params": {**server["params"], **mean}}


@frozen
class Idle(fs.FedAvg):
    """It uploads what it was sent."""

    def finish(self, task, down, memory, local):
        return {"params": down["params"]}, memory


@frozen
class Zero(fs.FedAvg):
    """Its loss is 0, so that weight decay alone moves a parameter, and BatchNorm's statistics move."""

    def loss(self, task, params, local, batch):
        return 0.0 * self.fit(task, params, batch)


@frozen
class Elsewhere(fs.FedAvg):
    """It names a module and no entry of the model."""

    def private(self, task):
        return frozenset({"head"})


BROKEN: dict[str, tuple[Callable[[], str], str, str]] = {  # the law that is run, its name, and what it says
    "unmasked": (
        lambda: laws.stacked_equals_one(problem("plain"), Unmasked()), laws.STACKED, r"fc\d\.\w+ differs by .* between the eng",
    ),
    "idle": (lambda: laws.stacked_equals_one(problem("plain"), Idle()), laws.STACKED, "nothing was trained"),
    "zero": (lambda: laws.stacked_equals_one(problem("normed"), Zero()), laws.STACKED, "no parameter has moved"),
    "padded": (
        lambda: laws.cohorts_are_invisible(problem("plain"), Padded()), laws.INVISIBLE, "between one stack and cohorts of 1",
    ),
    "marked": (lambda: laws.wire_changes_nothing(problem(), Marked()), laws.WIRE, "where messages travel as bytes"),
    "almost": (
        lambda: laws.neutral_gives_parent(problem("plain"), Almost(mu=0), fs.FedAvg()), laws.NEUTRAL, r"from FedAvg\(\)'s by",
    ),
    "leaky": (
        lambda: laws.private_stays_private(several(), Leaky(), "one"), laws.PRIVATE, "statistics ← head.0.weight, in upload 1 of",
    ),
    "counting": (lambda: laws.same_seed_same_bits(problem(), Counting(), "one"), laws.REPEATED, "of a second run of the same"),
    "remembering": (lambda: laws.same_seed_same_bits(problem(), Remembering(), "stacked"), laws.REPEATED, "of a second run"),
    "coin": (lambda: laws.same_seed_same_bits(problem(), Coin(), "one"), laws.REPEATED, "draws from a global generator"),
    "numpy": (lambda: laws.same_seed_same_bits(problem(), NumpyCoin(), "one"), laws.REPEATED, "draws from a global generator"),
    "winner": (
        lambda: laws.nothing_aliases(problem(), Winner(), "one"), laws.ALIASES, "client 0's upload shares memory with the server",
    ),
    "by place": (lambda: laws.uploads_in_any_order(problem(), ByPlace()), laws.ORDER, "where uploads come in another order"),
}  # fmt: skip


def several() -> Problem:
    return Problem(make("normed"), ragged(((13, 5), (7, 3), (6, 2))), problems.SETTINGS)


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_method_is_caught_by_the_law_that_speaks_of_it(case: str) -> None:
    run, law, says = BROKEN[case]
    with pytest.raises(Broken, match=says) as caught:
        run()
    assert caught.value.law == law
    assert str(caught.value).startswith(f"{law}: {caught.value.method}: ")


OBEYED: dict[str, Callable[[], str]] = {  # the same laws hold for the method that each of these was derived from
    laws.STACKED: lambda: laws.stacked_equals_one(problem("plain"), fs.FedAvg()),
    laws.INVISIBLE: lambda: laws.cohorts_are_invisible(problem("plain"), fs.FedAvg()),
    laws.WIRE: lambda: laws.wire_changes_nothing(problem(), fs.FedAvg()),
    laws.NEUTRAL: lambda: laws.neutral_gives_parent(problem("plain"), fs.FedProx(mu=0), fs.FedAvg()),
    laws.PRIVATE: lambda: laws.private_stays_private(several(), fs.FedPer(), "one"),
    laws.REPEATED: lambda: laws.same_seed_same_bits(problem(), fs.FedAvg(), "stacked"),
    laws.ALIASES: lambda: laws.nothing_aliases(problem(), fs.FedAvg(), "one"),
    laws.ORDER: lambda: laws.uploads_in_any_order(problem(), fs.FedAvg()),
}


@pytest.mark.parametrize("law", OBEYED)
def test_each_law_holds_for_the_method_as_it_was(law: str) -> None:
    assert OBEYED[law]()


# ---- the call ----------------------------------------------------------------------------------------------------------------
class Hold(fs.FedProx):
    """FedProx under another name, so that its hooks are rehearsed."""


def test_check_reports_every_law() -> None:
    state = torch.get_rng_state()
    report = testing.check(Hold(mu=0.3), neutral={"mu": 0.0}, parent=fs.FedAvg())
    assert torch.equal(state, torch.get_rng_state())
    assert report.passed
    assert report.method == "Hold(mu=0.3)"
    states = {outcome.law: outcome.state for outcome in report.outcomes}
    assert states.pop(laws.PRIVATE) == "not applicable"
    assert set(states.values()) == {"passed"}
    assert {"hooks keep the contract", *OBEYED} == {*states, laws.PRIVATE}
    text = str(report)
    assert text == repr(report)
    assert "Hold(mu=0.0) is FedAvg(), to the bit" in text
    assert text.splitlines()[-1].startswith("Hold(mu=0.3): 8 of 8 laws hold, ")


def test_check_lists_all_failures() -> None:
    with pytest.raises(testing.LawError) as caught:
        testing.check(ByPlace(), clients=3, rounds=2, epochs=1, participation=1.0)
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value).startswith(
        f"1 of 7 laws do not hold for ByPlace():\n  {laws.ORDER}: merge() gives another"
    )
    report = testing.check(Winner(), clients=2, rounds=2, epochs=1, participation=1.0, raises=False)
    assert not report.passed
    assert {outcome.law for outcome in report.failed} == {laws.ALIASES, laws.ORDER}


def test_private_names_that_the_model_does_not_have_do_not_pass(monkeypatch) -> None:
    report = testing.check(Elsewhere(), raises=False)
    assert not report.passed
    assert report.outcomes[0].why.startswith("Elsewhere.private() names 'head', which is no entry of the model.")
    monkeypatch.setattr(rehearsal, "is_own", lambda method: False)  # as methods that come with fedstill
    with pytest.raises(Broken, match=r"private\(\) names 'head', which is no entry of the model"):
        laws.private_stays_private(several(), Elsewhere(), "one")


@pytest.mark.parametrize("size", [0.01, 1.0, 1e5])
def test_rounding_grows_with_the_weights(size: float) -> None:
    def ended(value: float) -> SimpleNamespace:
        return SimpleNamespace(
            generic=lambda: {"w": torch.tensor([value], dtype=torch.float64)}, task=SimpleNamespace(clients=0)
        )

    near, far = (ended(size + share * max(1.0, size)) for share in (1e-11, 1e-9))
    assert laws._close(laws.STACKED, fs.FedAvg(), ended(size), near, laws.ROUNDING, "") < 1e-10 * max(1.0, size)
    with pytest.raises(Broken, match="generic w differs by"):
        laws._close(laws.STACKED, fs.FedAvg(), ended(size), far, laws.ROUNDING, "")


def test_a_mistake_in_a_hook_stops_the_laws() -> None:
    @frozen
    class Wrong(fs.FedAvg):
        def finish(self, task, down, memory, local):
            return local

    report = testing.check(Wrong(), raises=False)
    assert [(outcome.law, outcome.state) for outcome in report.outcomes] == [("hooks keep the contract", "failed")]
    assert report.outcomes[0].why.startswith("Wrong.finish() returned one tree (params).")


@pytest.mark.parametrize("objective", ["regression", "multilabel", "tokens"])
def test_other_objectives(objective: str) -> None:
    assert testing.check(Hold(mu=0.3), objective=objective, clients=2, rounds=2, epochs=1, participation=1.0).passed


def test_a_model_and_a_federation_of_ones_own() -> None:
    g = np.random.default_rng(0)
    data = fs.Federation.from_arrays([(g.normal(size=(n, 2)), g.integers(0, 2, n)) * 2 for n in (9, 5)])
    report = testing.check(
        fs.FedPer(), model=lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), data=data, head="2", rounds=2,
        epochs=1, participation=1.0,
    )  # fmt: skip
    assert report.passed
    assert {outcome.law: outcome.state for outcome in report.outcomes}[laws.PRIVATE] == "passed"


class Branching(nn.Module):
    """It chooses its way by the numbers, so that it cannot be stacked."""

    head_modules = "out"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.body(x)
        return self.out(h) if bool(x.sum() < 1e9) else self.out(-h)


def test_a_model_that_cannot_be_stacked_is_no_fault_of_the_method() -> None:
    report = testing.check(Hold(), model=Branching(), rounds=2, epochs=1, participation=1.0)
    states = {outcome.law: outcome.state for outcome in report.outcomes}
    assert states[laws.STACKED] == states[laws.INVISIBLE] == "not applicable"
    assert states[laws.WIRE] == states[laws.REPEATED] == "passed"


REFUSED = {
    "a class": (dict(method=fs.FedAvg), "method = <class"),
    "no parent": (dict(neutral={"mu": 0}), "should be given together with parent"),
    "no such field": (dict(neutral={"nu": 0}, parent=fs.FedAvg()), "'nu': should be a field of FedProx: 'mu'?"),
    "no objective": (dict(objective="classify"), "objective = 'classify': should be 'classification'?"),
    "no clients": (dict(clients=0), "clients = 0: should be a whole number"),
    "no setting": (dict(rouns=3), "rouns = 3: should be left out, or did you mean 'rounds'?"),
    "an engine": (dict(engine="one"), "the laws try every engine"),
    "a cohort": (dict(cohort=2), "cohorts of several sizes"),
    "a type": (dict(dtype="float32"), "dtype = 'float32': should be left out: the laws compare in float64"),
    "no model": (dict(model=3), "model = int: should be an nn.Module"),
    "no data": (dict(data=[1]), "data = list: should be a fedstill.Federation"),
    "no models": (dict(of="all"), "of = 'all': should be 'both', 'generic' or 'personal'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked_is_refused(case: str) -> None:
    given, says = REFUSED[case]
    with pytest.raises(fs.InputError) as caught:
        testing.check(**{"method": fs.FedProx(), **given})
    assert says in str(caught.value)


def test_a_method_that_refuses_the_problem_does_not_pass() -> None:
    @frozen
    class Picky(fs.FedAvg):
        def check(self, task):
            raise fs.InputError("clients", task.clients, "at least 100")

    report = testing.check(Picky(), raises=False)
    assert not report.passed
    assert "at least 100" in report.outcomes[0].why


# ---- the command -------------------------------------------------------------------------------------------------------------
CODE = """
from dataclasses import dataclass
from typing import ClassVar
import fedstill as fs

@dataclass(frozen=True, kw_only=True)
class MOON(fs.FedProx):
    id: ClassVar[str] = "moon"
    warm: bool = fs.setting(False, "own flag")

@dataclass(frozen=True, kw_only=True)
class ByPlace(fs.FedAvg):
    id: ClassVar[str] = "by-place"

    def merge(self, task, server, uploads):
        mean = task.average([u.params for u in uploads], [1.0 + i for i in range(len(uploads))], server["params"])
        return {**server, "params": mean}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch):
    """A file with two methods; what is registered goes again."""
    monkeypatch.setattr(own, "_allowed", [False])
    path = tmp_path / "my_method.py"
    path.write_text(CODE)
    before = dict(METHODS)
    yield path
    METHODS.clear()
    METHODS.update(before)


def test_the_command(file: Path, capsys) -> None:
    words = ["--mu", "0.3", "--neutral", "mu=0,warm=false", "--parent", "fedavg", "--clients", "2"]
    assert main(["check", f"{file}:MOON", *words]) == 0
    out = capsys.readouterr().out
    assert "MOON(mu=0.3): 8 of 8 laws hold" in out
    assert "MOON(mu=0.0) is FedAvg(), to the bit" in out
    assert main(["check", f"{file}:ByPlace", "--clients", "2"]) == 1
    shown = capsys.readouterr()
    assert f"{laws.ORDER}: merge() gives another" in shown.out
    assert shown.err == f"fedstill: ByPlace() does not obey: {laws.ORDER}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "method = nothing: should be one method"),
        (["fedavgg"], "'fedavg'?"),
        (["fedprox", "fedavg"], "should be one method"),
        (["fedprox", "--mu", "-1"], "--mu = -1.0: should be a number at least 0"),
        (["fedprox", "--neutral", "mu=0"], "--parent = nothing: should be given too"),
        (["fedprox", "--neutral", "mu", "--parent", "fedavg"], "should be FIELD=VALUE"),
        (["fedprox", "--neutral", "nu=0", "--parent", "fedavg"], "a field of FedProx: 'mu'?"),
        (["fedprox", "--objective", "regress"], "--objective = 'regress': should be 'regression'?"),
        (["fedprox", "--clients", "none"], "--clients = 'none'"),
        (["fedprox", "--rounds", "3"], "--rounds"),
    ],
)
def test_the_command_refuses_in_one_line(words: list[str], says: str, capsys) -> None:
    assert main(["check", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert says in shown.err


def test_help_has_the_methods_own_flags(file: Path, capsys) -> None:
    assert main(["check", f"{file}:MOON", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--warm" in out
    assert "own flag" in out
    assert "--neutral FIELD=VALUE" in out


def test_the_report_has_no_state_of_its_own() -> None:
    assert dataclasses.is_dataclass(testing.Report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        testing.Report("", ()).method = "other"  # type: ignore[misc]
