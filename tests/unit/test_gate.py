"""The gate: one bad upload is refused and named, and the round is the one in which that client had not answered."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.tree import Tree
from fedstill.report.summary import _numbers
from fedstill.run.experiment import Training
from fedstill.run.journal import Journal
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.server import average
from fedstill.server.gate import Gate, difference, example_upload, spec_of
from fedstill.transport.messages import Reply

from ..problems import SETTINGS, Spy, Tampered, finish, identical, make, needed, ragged, rows, states

BAD, ROUND = 2, 2  # the client that sends something else, and when
SIZES = ((13, 5), (7, 3), (1, 2), (10, 4), (5, 1), (8, 2))
Change = Callable[[Tree], Tree]


def prepared(method: fs.Method, model: str = "normed", *, average=tree.mean, **changes) -> Simulation:
    training = Training(**{**SETTINGS, "participation": 1.0, "engine": "one", **needed(method), **changes})
    return prepare(method, make(model), ragged(SIZES), None, training, average=average)


def sends(change: Change) -> Tampered:
    """A transport by which one client's upload is changed in one round."""

    def pass_on(reply: Reply) -> Reply:
        if (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD):
            return dataclasses.replace(reply, up=change(tree.clone(reply.up)))
        return reply

    return Tampered(pass_on)


def is_lost(reply: Reply) -> Reply | None:
    return None if (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD) else reply


def without(name: str) -> Change:
    return lambda up: {**up, "params": {n: v for n, v in up["params"].items() if n != name}}


def replaced(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda up: {**up, "params": {**up["params"], name: new(up["params"][name])}}


def holding(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One number among the others."""

    def put(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.clone()
        leaf.view(-1)[-1] = value
        return leaf

    return put


PARAMETER, BUFFER = "head.0.weight", "head.1.running_var"
NOT_FINITE = "its upload holds numbers that are not finite"
TOO_LARGE = "its upload holds numbers that are too large: their norm is above 1.8e+19"
MISMATCHES: dict[str, tuple[Change, str]] = {
    "missing": (without(PARAMETER), f"params|{PARAMETER} is missing from its upload"),
    "buffer missing": (without(BUFFER), f"params|{BUFFER} is missing from its upload"),
    "all missing": (lambda up: {}, "is missing from its upload"),
    "extra": (
        lambda up: {**up, "params": {**up["params"], "more": torch.ones(2)}},
        "params|more does not belong into its upload",
    ),
    "extra tree": (lambda up: {**up, "secret": {"x": torch.ones(2)}}, "secret|x does not belong into its upload"),
    "renamed": (
        lambda up: {**without(PARAMETER)(up), "other": up["params"][PARAMETER]},
        f"params|{PARAMETER} is missing",
    ),
    "shape": (replaced(PARAMETER, lambda v: v.t()), f"params|{PARAMETER} has shape (6, 5) instead of (5, 6)"),
    "one row": (replaced(PARAMETER, lambda v: v[:1]), "has shape (1, 6) instead of (5, 6)"),
    "flat": (replaced(PARAMETER, lambda v: v.flatten()), "has shape (30,) instead of (5, 6)"),
    "dtype": (replaced(PARAMETER, lambda v: v.float()), f"params|{PARAMETER} has dtype float32 instead of float64"),
    "whole": (replaced("bn.num_batches_tracked", lambda v: v.double()), "has dtype float64 instead of int64"),
    "half": (replaced(PARAMETER, lambda v: v.half()), "has dtype float16 instead of float64"),
    "int": (replaced(PARAMETER, lambda v: v.long()), "has dtype int64 instead of float64"),
    "bool": (replaced(PARAMETER, lambda v: v > 0), "has dtype bool instead of float64"),
    "scalar": (replaced(PARAMETER, lambda v: v[0, 0]), "has shape () instead of (5, 6)"),
    "one number": (replaced("fc1.bias", lambda v: v[:1]), "has shape (1,) instead of (6,)"),
    "one column": (replaced(PARAMETER, lambda v: v[:, :1]), "has shape (5, 1) instead of (5, 6)"),
    "sparse": (replaced(PARAMETER, lambda v: v.to_sparse()), f"params|{PARAMETER} is no plain tensor"),
    "meta": (replaced(PARAMETER, lambda v: v.to("meta")), f"params|{PARAMETER} is no plain tensor"),
    "with a gradient": (replaced(PARAMETER, lambda v: v.requires_grad_()), f"params|{PARAMETER} is no plain tensor"),
    "a text": (replaced(PARAMETER, lambda v: "5"), f"params|{PARAMETER} is no tensor"),  # type: ignore[arg-type,return-value]
    "nothing": (lambda up: None, "its upload is no tree of tensors"),  # type: ignore[arg-type,return-value]
    "an empty branch": (lambda up: {**up, "more": {}}, "more| does not belong into its upload"),
    "a flat name": (lambda up: tree.flatten(up), "has an entry with the name"),
    "deep": (
        lambda up: {**up, "more": functools.reduce(lambda b, _: {"b": b}, range(99), {})},
        "more than 32 branches",
    ),
    "huge": (replaced(PARAMETER, holding(1e30)), TOO_LARGE),
    "huge in a buffer": (replaced(BUFFER, holding(-1e30)), TOO_LARGE),
    "a negative variance": (replaced(BUFFER, holding(-1e-3)), f"params|{BUFFER} holds a variance below 0"),
    "a huge whole number": (replaced("bn.num_batches_tracked", lambda v: v * 0 + 2**62), TOO_LARGE),
    "nan": (replaced(PARAMETER, holding(float("nan"))), NOT_FINITE),
    "inf": (replaced(PARAMETER, holding(float("inf"))), NOT_FINITE),
    "-inf": (replaced(PARAMETER, holding(float("-inf"))), NOT_FINITE),
    "nan in a buffer": (replaced(BUFFER, holding(float("nan"))), NOT_FINITE),
    "inf in a buffer": (replaced(BUFFER, holding(float("inf"))), NOT_FINITE),
}


def reports(**numbers: object) -> Tampered:
    """A transport by which one client's report holds other numbers in one round; None: the number is missing."""

    def pass_on(reply: Reply) -> Reply:
        if (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD):
            report = {name: value for name, value in {**reply.report, **numbers}.items() if value is not None}
            return dataclasses.replace(reply, report=report)  # type: ignore[arg-type]
        return reply

    return Tampered(pass_on)


MISREPORTS: list[tuple[dict[str, object], str]] = [
    ({"samples": 0}, "it reports 0 samples; 1 are registered"),
    ({"samples": -9}, "it reports -9 samples"),
    ({"samples": float("nan")}, "it reports nan samples"),
    ({"samples": 10**12}, "it reports 1e+12 samples; 1 are registered"),
    ({"samples": 1e18}, "it reports 1e+18 samples"),
    ({"samples": 10**5000}, "it reports a int samples"),
    ({"samples": "5"}, "it reports '5' samples"),
    ({"samples": True}, "it reports True samples"),
    ({"samples": 1.5}, "it reports 1.5 samples"),
    ({"samples": torch.tensor(1.0)}, "it reports a Tensor samples"),
    ({"loss": "5"}, "it reports '5' loss"),
    ({"loss": True}, "it reports True loss"),
    ({"loss": None}, "its report has no loss"),
    ({"steps": None}, "its report has no steps"),
    ({"steps": 10**9}, "it reports 1e+09 steps; 2 are the most it can make"),
    ({"steps": 0.5}, "it reports 0.5 steps"),
    ({"finite": 7.0}, "it reports 7 finite"),
    ({"finite": "1"}, "it reports '1' finite"),
    ({"seconds": float("inf")}, "it reports inf seconds"),
    ({"flops": "many"}, "it reports 'many' flops"),
    ({str(i): 1.0 for i in range(99)}, "its report is no table of at most 64 numbers"),
]


@functools.lru_cache
def reference(method: fs.Method) -> tuple[fs.Run, fs.Run]:
    """A run in which the client's reply is lost, and one in which nothing happens."""
    return finish(prepared(method), Tampered(is_lost)), finish(prepared(method))


EACH = [(fs.SCAFFOLD(), name) for name in MISMATCHES if name != "a negative variance"] + [  # its uploads are changes
    (method, name)
    for method in (fs.FedAvg(), fs.PFedSD())
    for name in ("shape", "nan", "inf in a buffer", "a negative variance")
]


@pytest.mark.parametrize(("method", "name"), EACH, ids=lambda v: v if isinstance(v, str) else v.id)
def test_a_bad_upload_is_as_none_at_all(name: str, method: fs.Method) -> None:
    change, reason = MISMATCHES[name]
    refused, (lost, honest) = finish(prepared(method), sends(change)), reference(method)
    assert [record.get("rejected", {}).keys() for record in refused.history] == [set(), {str(BAD)}, set()]
    assert reason in refused.history[ROUND - 1]["rejected"][str(BAD)]
    bare = [{name: value for name, value in record.items() if name != "rejected"} for record in rows(refused.history)]
    bytes_up = {"bytes_up", "bytes_total"}  # what arrived did arrive
    for ours, theirs in zip(bare, rows(lost.history), strict=True):
        assert {n: v for n, v in ours.items() if n not in bytes_up} == {
            n: v for n, v in theirs.items() if n not in bytes_up
        }
    assert refused.history[ROUND - 1]["participants"] == [0, 1, 3, 4, 5]
    assert refused.history[ROUND - 1]["missing"] == [BAD]
    assert identical(states(refused), states(lost))
    assert identical({"": tree.flatten(refused.server)}, {"": tree.flatten(lost.server)})
    for k in range(len(SIZES)):
        assert identical({"": tree.flatten(refused.memory(k))}, {"": tree.flatten(lost.memory(k))})
    assert not identical(states(refused), states(honest))  # or nothing was shown


@pytest.mark.parametrize(("numbers", "reason"), MISREPORTS, ids=[reason for _, reason in MISREPORTS])
def test_a_report_that_cannot_be_is_as_no_reply_at_all(numbers: dict[str, object], reason: str) -> None:
    refused, (lost, _) = finish(prepared(fs.SCAFFOLD()), reports(**numbers)), reference(fs.SCAFFOLD())
    assert [record.get("rejected") for record in refused.history] == [None, {str(BAD): reason}, None]
    assert identical(states(refused), states(lost))
    assert identical({"": tree.flatten(refused.server)}, {"": tree.flatten(lost.server)})


def test_finite_is_not_believed_beside_weights_that_are_not() -> None:
    def change(reply: Reply) -> Reply:
        at = (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD)
        up = tree.map(lambda leaf: leaf * torch.nan if leaf.is_floating_point() else leaf, reply.up)
        return dataclasses.replace(reply, up=up, report={**reply.report, "finite": 1.0}) if at else reply

    refused, (lost, _) = finish(prepared(fs.FedAvg()), Tampered(change)), reference(fs.FedAvg())
    assert refused.history[1]["rejected"] == {str(BAD): NOT_FINITE}
    assert identical(states(refused), states(lost))


WAYS: dict[str, dict[str, object]] = {
    "stacked": {"engine": "stacked"},
    "timed": {"profile": "lognormal:0.5"},
    "wait-free": {"profile": "lognormal:0.5", "wait_free": "until-download"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["huge", "nothing", "an empty branch", "a text", "samples"])
def test_in_every_kind_of_round(way: str, name: str) -> None:
    """Time does not matter for what is merged here: nobody is late."""
    method, bad = fs.Ditto(), reports(samples="5") if name == "samples" else sends(MISMATCHES[name][0])
    refused = finish(prepared(method, **WAYS[way]), bad)
    lost = finish(prepared(method, engine="stacked" if way == "stacked" else "one"), Tampered(is_lost))
    assert [set(record.get("rejected", {})) for record in refused.history] == [set(), {str(BAD)}, set()]
    assert identical({"": refused.generic()}, {"": lost.generic()})


def test_nothing_of_it_is_left_where_uploads_lie_in_one_stretch_of_memory() -> None:
    """Spoilt in place: by the stacked engine uploads are rows of one buffer, and the mean is taken of rows together."""

    def spoil(reply: Reply) -> Reply:
        if (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD):
            reply.up["params"][PARAMETER][0, 0] = float("nan")
        return reply

    refused, lost = (finish(prepared(fs.FedAvg(), engine="stacked"), Tampered(change)) for change in (spoil, is_lost))
    assert refused.history[1]["rejected"] == {str(BAD): NOT_FINITE}
    assert identical(states(refused), states(lost))
    assert identical({"": refused.generic()}, {"": lost.generic()})


def test_it_is_as_a_round_whose_cohort_were_the_others() -> None:
    session = start([Start(prepared(fs.FedAvg()))])
    others = [k for k in range(len(SIZES)) if k != BAD]
    session.coordinators[0].sampler = lambda scene, wanted: others if scene.round == ROUND else [*scene.clients]
    (absent,) = session.run()
    refused = finish(prepared(fs.FedAvg()), sends(MISMATCHES["nan"][0]))
    assert identical(states(refused), states(absent))


def test_entries_beside_the_parameters_are_checked_too() -> None:
    change: Change = lambda up: {**up, "c": {**up["c"], "fc1.bias": up["c"]["fc1.bias"] * float("nan")}}  # noqa: E731
    found = finish(prepared(fs.SCAFFOLD()), sends(change))
    assert found.history[1]["rejected"] == {str(BAD): NOT_FINITE}
    assert tree.finite(found.server)


def test_all_may_be_rejected_and_the_model_stays() -> None:
    def empty(reply: Reply) -> Reply:
        return dataclasses.replace(reply, up={}) if (reply.kind, reply.round) == ("train", 2) else reply

    found, short = finish(prepared(fs.FedAvg()), Tampered(empty)), finish(prepared(fs.FedAvg(), rounds=1))
    assert found.history[1]["participants"] == []
    assert len(found.history[1]["rejected"]) == 6
    two = finish(prepared(fs.FedAvg(), rounds=2), Tampered(empty))
    assert identical({"": two.server["params"]}, {"": short.server["params"]})
    assert not identical({"": found.server["params"]}, {"": two.server["params"]})  # round 3 is a round again


def test_a_client_that_says_that_its_training_has_diverged_stops_the_run() -> None:
    """Its own report, not what arrived: nobody tampered, lr is too large."""

    def diverged(reply: Reply) -> Reply:
        at = (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD)
        return dataclasses.replace(reply, report={**reply.report, "finite": 0.0}) if at else reply

    with pytest.raises(fs.TrainingError, match="round 2, client 2: weights are no longer finite"):
        finish(prepared(fs.FedAvg()), Tampered(diverged))


def diverges(clients: set[int]) -> Tampered:
    """A transport by which the reports of some clients say that their training diverged in one round."""

    def change(reply: Reply) -> Reply:
        at = reply.kind == "train" and reply.round == ROUND and reply.client in clients
        return dataclasses.replace(reply, report={**reply.report, "loss": float("nan")}) if at else reply

    return Tampered(change)


@pytest.mark.parametrize("how", [{}, {"profile": "uniform"}, {"engine": "stacked"}], ids=["sync", "timed", "stacked"])
def test_where_divergence_is_refused_the_others_go_on_without_it(how: dict) -> None:
    refused = finish(prepared(fs.SCAFFOLD(), on_divergence="refuse", **how), diverges({BAD}))
    lost = finish(prepared(fs.SCAFFOLD(), **how), Tampered(is_lost))
    assert [record.get("rejected") for record in refused.history] == [None, {"2": "the training loss is nan"}, None]
    assert identical(states(refused), states(lost))
    assert identical({"": tree.flatten(refused.server)}, {"": tree.flatten(lost.server)})


def test_where_everybody_diverges_one_line_says_so() -> None:
    with pytest.raises(fs.TrainingError, match=r"round 2: the training of all 6 clients diverged \(client 0: .* nan\)"):
        finish(prepared(fs.FedAvg(), on_divergence="refuse"), diverges(set(range(6))))
    found = finish(prepared(fs.FedAvg(), on_divergence="refuse"), diverges(set(range(5))))  # all but one
    assert found.history[1]["participants"] == [5]


def test_where_all_uploads_are_too_large_one_line_says_so() -> None:
    """They are finite and nobody reports a divergence; without it the run would go on for ever and merge nothing."""
    huge, _ = MISMATCHES["huge"]

    def change(reply: Reply) -> Reply:
        return dataclasses.replace(reply, up=huge(reply.up)) if reply.kind == "train" else reply

    with pytest.raises(
        fs.TrainingError, match=r"round 1: the training of all 6 clients diverged \(client 0: .* too large"
    ):
        finish(prepared(fs.FedAvg()), Tampered(change))


def test_one_client_that_diverges_ends_no_run_of_single_replies() -> None:
    """FedAsync merges one reply at a time, so the only one of a round may be the bad one."""
    single = dict(profile="lognormal:0.5", mode="fedasync", rounds=12)

    def change(reply: Reply) -> Reply:
        at = reply.kind == "train" and reply.client == BAD
        return dataclasses.replace(reply, report={**reply.report, "finite": 0.0}) if at else reply

    found = finish(prepared(fs.FedAvg(), on_divergence="refuse", **single), Tampered(change))
    assert {reason for record in found.history for reason in record.get("rejected", {}).values()} == {
        "weights are no longer finite"
    }
    assert all(BAD not in record["participants"] for record in found.history)


def test_in_simulated_time_a_bad_upload_is_rejected_and_takes_its_time() -> None:
    timed = dict(profile="lognormal:0.5")
    found = finish(prepared(fs.FedAvg(), **timed), sends(MISMATCHES["nan"][0]))
    plain = finish(prepared(fs.FedAvg(), **timed))
    assert [record["time"] for record in found.history] == [record["time"] for record in plain.history]
    assert found.history[1]["timeline"]["state"][BAD] == "rejected"
    assert found.history[1]["participants"] == [0, 1, 3, 4, 5]
    lost = finish(prepared(fs.FedAvg()), Tampered(is_lost))
    assert identical({"": found.generic()}, {"": lost.generic()})


@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
def test_a_bad_upload_is_rejected_among_replies_as_they_arrive(mode: str) -> None:
    def bad(reply: Reply) -> Reply:
        return (
            sends(MISMATCHES["shape"][0]).change(dataclasses.replace(reply, round=ROUND))
            if reply.client == BAD
            else reply
        )

    def change(reply: Reply) -> Reply:
        return dataclasses.replace(bad(reply), round=reply.round)

    asynchronous = dict(profile="lognormal:0.5", mode=mode, buffer=2 if mode == "fedbuff" else 0, rounds=8)
    found = finish(prepared(fs.FedAvg(), **asynchronous), Tampered(change))
    rejected = [record["rejected"] for record in found.history if "rejected" in record]
    assert rejected
    assert all(reasons.keys() == {str(BAD)} for reasons in rejected)
    assert all(BAD not in record["participants"] for record in found.history)
    assert tree.finite(found.server)


# ---- other orders ----------------------------------------------------------------------------------------------------
def answers(kind: str, client: int, change: Callable[[Reply], Reply], round: int = 0) -> Tampered:
    """A transport by which one client's replies to orders of one kind are changed, in one round or (0) in all."""

    def pass_on(reply: Reply) -> Reply:
        return change(reply) if reply.kind == kind and reply.client == client and round in (0, reply.round) else reply

    return Tampered(pass_on)


def says(**numbers: object) -> Callable[[Reply], Reply]:
    return lambda reply: dataclasses.replace(reply, report={**reply.report, **numbers})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"generic": 1000.0}, "it reports 1000 right answers (generic) of 2 samples"),
        ({"samples": 10**6, "generic": 10**6}, "it reports 1e+06 samples; 2 are registered"),
        ({"personal": -1.0}, "it reports -1 personal"),
        ({"personal": float("nan")}, "it reports nan personal"),
        ({"generic": "2"}, "it reports '2' generic"),
        ({"generic": 1.5}, "it reports 1.5 generic"),
    ],
)
def test_scores_that_cannot_be_do_not_count(numbers: dict[str, object], reason: str) -> None:
    """The means are those over the others: by hand from the record of each client in an honest run."""
    honest = finish(prepared(fs.PFedSD()))
    found = finish(prepared(fs.PFedSD()), answers("score", BAD, says(**numbers), ROUND))
    assert [record.get("rejected") for record in found.history] == [None, {str(BAD): reason}, None]
    others = {k: rate for k, rate in honest.history[1]["personal_clients"].items() if k != str(BAD)}
    assert found.history[1]["personal_clients"] == others
    assert found.history[1]["personal"] == pytest.approx(sum(others.values()) / len(others))
    assert 0 <= found.history[1]["generic"] <= 1
    assert identical(states(found), states(honest))


def test_where_nobodys_scores_can_be_one_line_says_so() -> None:
    def change(reply: Reply) -> Reply:
        return says(generic=1e6)(reply) if reply.kind == "score" else reply

    with pytest.raises(
        fs.TrainingError, match=r"round 1: no client sent scores that can be; client 0: it reports 1e\+06"
    ):
        finish(prepared(fs.FedAvg()), Tampered(change))


@pytest.mark.parametrize("name", ["missing", "shape", "half", "nan", "huge", "extra", "nothing"])
def test_a_model_that_cannot_be_is_refused_with_the_reason(name: str) -> None:
    change, reason = MISMATCHES[name]
    bad = answers("model", BAD, lambda reply: dataclasses.replace(reply, up=change(reply.up)))
    found = finish(prepared(fs.PFedSD(), rounds=1), bad)
    assert found.personal(BAD + 1)
    with pytest.raises(fs.TrainingError, match="client 2 did not answer an order of the kind 'model': ") as error:
        found.personal(BAD)
    assert reason in str(error.value)


def test_fine_tuning_leaves_out_a_client_whose_numbers_cannot_be() -> None:
    bad = answers("tune", BAD, says(after=99.0))
    found, honest = (finish(prepared(fs.FedAvg(), "plain", rounds=1), way) for way in (bad, None))
    rates = {k: v for k, v in fs.scores.fine_tuned(honest, 1)["fine_tuned_clients"].items() if k != str(BAD)}
    assert fs.scores.fine_tuned(found, 1)["fine_tuned_clients"] == rates
    assert found._coordinator is not None
    assert found._coordinator.noted == {str(BAD): "it reports 99 right answers (after) of 2 samples"}


@pytest.mark.parametrize("numbers", [{"steps": "5"}, {"loss": None}])
def test_replies_to_idle_orders_are_checked_too(numbers: dict[str, object]) -> None:
    timed = dict(profile="lognormal:0.5", wait_free="until-download")
    found = finish(prepared(fs.Ditto(), **timed), answers("idle", BAD, says(**numbers)))
    rejected = [record["rejected"] for record in found.history if "rejected" in record]
    assert rejected
    assert all(reasons.keys() == {str(BAD)} for reasons in rejected)
    assert identical({"": found.generic()}, {"": finish(prepared(fs.Ditto(), **timed)).generic()})


STATES: dict[str, Callable[[Reply], Reply]] = {
    "a number": says(last=-3.0),
    "no memory": lambda reply: dataclasses.replace(reply, up={"memory": {}, "more": {"x": torch.ones(1)}}),
    "a shape": lambda reply: dataclasses.replace(reply, up={"memory": {"v": {"fc1.bias": torch.ones(1)}}}),
}


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_leaves_out_a_state_that_cannot_be(name: str, tmp_path: Path) -> None:
    """It costs the others nothing; the client itself begins anew, or at a real site goes on with what it has kept."""
    journal = Journal(tmp_path)
    journal.begin("", {}, torch.device("cpu"))
    found = finish(
        prepared(fs.PFedSD(), "plain", rounds=1),
        answers("state", BAD, STATES[name]),
        journal=journal,
        checkpoint_every=1,
    )
    checkpoint = journal.load(torch.device("cpu"))
    assert checkpoint is not None
    assert [client for client, _ in checkpoint.clients()] == [0, 1, 3, 4, 5]
    assert found._coordinator is not None
    assert set(found._coordinator.noted) == {str(BAD)}


def test_the_table_names_who_was_rejected_and_why() -> None:
    def change(reply: Reply) -> Reply:
        if reply.kind == "train" and reply.client == BAD and reply.round > 1:
            return dataclasses.replace(reply, up={})
        if reply.kind == "train" and reply.client == 4 and reply.round == 3:
            return says(samples="5")(reply)
        return reply

    found = finish(prepared(fs.FedAvg(), "plain"), Tampered(change))
    assert found.rejected == {2: ["params|fc1.weight is missing from its upload"] * 2, 4: ["it reports '5' samples"]}
    assert _numbers(found)["rejected"] == {"2": 2, "4": 1}
    lines = found.table().splitlines()
    assert "client 2: 2 replies rejected (params|fc1.weight is missing from its upload)" in lines
    assert "client 4: 1 reply rejected (it reports '5' samples)" in lines


# ---- counts that are not registered, and norms -----------------------------------------------------------------------
def claims(*samples: float) -> list[Reply]:
    return [Reply("train", 1, k, {}, {"loss": 1.0, "steps": 1.0, "samples": n}) for k, n in enumerate(samples)]


def test_an_unregistered_client_claims_at_most_a_share() -> None:
    gate = Gate(max_share=0.7)
    assert gate.shares(claims(10, 20, 10)) == {}
    assert gate.shares(claims(10, 20, 10**12)) == {2: "it reports 1e+12 samples, 100% of the round's; 70% is the most"}
    assert set(gate.shares(claims(10, 20, 10**12, 10**15, 10))) == {2, 3}
    assert gate.shares(claims(10**12)) == {}  # alone: its weight is 1 whatever it claims
    known = Gate(samples=(10, 20), max_share=0.5)
    assert set(known.shares(claims(10, 20, 31))) == {2}
    assert known.shares(claims(10, 20, 30)) == {}
    assert set(Gate(samples=(10, 20, 7), max_share=0.7).shares(claims(10, 20, 10**9), ())) == {
        2
    }  # test samples, which nobody has registered


def test_scores_of_unregistered_tests_have_a_share_too() -> None:
    session = start([Start(prepared(fs.FedAvg()))], answers("score", BAD, says(samples=1e9, generic=1e9)))
    session.coordinators[0].tests = {}
    (found,) = session.run()
    assert isinstance(found, fs.Run)
    assert found.rejected == {BAD: ["it reports 1e+09 samples, 100% of the round's; 90% is the most"] * 3}
    assert found.history[-1]["personal_clients"].keys() == {"0", "1", "3", "4", "5"}


@pytest.mark.parametrize("samples", [0, -9, float("nan"), 1.5, "5", True, None, 2**54])
def test_an_unregistered_count_is_a_whole_number_above_0(samples: object) -> None:
    gate, (reply,) = Gate(), claims(7)
    assert gate.reports([reply]) == {}
    assert gate.reports([dataclasses.replace(reply, report={**reply.report, "samples": samples})])  # type: ignore[dict-item]


def moved(run: fs.Run, before: fs.Run) -> float:
    """How far the server's parameters have come in the last round, of a plain model."""
    a, b = run.generic(), before.generic()
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def test_the_norm_of_an_update_is_bounded_by_refusing_or_by_clipping() -> None:
    def far(reply: Reply) -> Reply:
        at = (reply.kind, reply.round, reply.client) == ("train", ROUND, BAD)
        return dataclasses.replace(reply, up=tree.map(lambda v: v + 100.0, reply.up)) if at else reply

    refused = finish(prepared(fs.FedAvg(), "plain", max_norm=50.0), Tampered(far))
    lost = finish(prepared(fs.FedAvg(), "plain"), Tampered(is_lost))
    assert "away from what was sent; 50 is the most" in refused.history[1]["rejected"][str(BAD)]
    assert identical(states(refused), states(lost))
    two = {"rounds": 2, "max_norm": 0.01, "over_norm": "clip"}
    clipped, before = (finish(prepared(fs.FedAvg(), "plain", **{**two, "rounds": n}), Tampered(far)) for n in (2, 1))
    assert set(clipped.history[1]["clipped"]) == set(map(str, range(6)))
    assert clipped.history[1]["clipped"][str(BAD)] > 100
    assert 0 < moved(clipped, before) <= 0.01 * (1 + 1e-9)  # a mean of steps that are no longer than that


def test_what_is_clipped_lies_between_what_was_sent_and_what_came_up() -> None:
    """By hand: a step of norm 5 is cut to 1; the buffer goes along, whole numbers and other entries stay."""
    sent = {"params": {"w": torch.zeros(2), "mean": torch.tensor([1.0]), "n": torch.tensor(3)}}
    up = {
        "params": {"w": torch.tensor([3.0, 4.0]), "mean": torch.tensor([6.0]), "n": torch.tensor(8)},
        "c": torch.ones(1),
    }
    gate = Gate(max_norm=1.0, clip=True)
    ((reply,), reasons, norms) = gate.bounded([Reply("train", 1, 0, up, {})], {0: sent}, ["w"])
    assert (reasons, norms) == ({}, {0: 5.0})
    assert torch.allclose(reply.up["params"]["w"], torch.tensor([0.6, 0.8]))
    assert torch.allclose(reply.up["params"]["mean"], torch.tensor([2.0]))
    assert int(reply.up["params"]["n"]) == 8
    assert reply.up["c"] is up["c"]
    assert torch.equal(up["params"]["w"], torch.tensor([3.0, 4.0]))  # what arrived is not changed


@pytest.mark.parametrize("method", [fs.SCAFFOLD(), fs.L2GD(), fs.CD2PFed(p=0.5)], ids=lambda method: method.id)
def test_a_norm_is_refused_where_uploads_are_no_models(method: fs.Method) -> None:
    with pytest.raises(fs.InputError, match=f"max_norm = 1.0: should be 0 for {method.id}"):
        prepared(method, max_norm=1.0)


# ---- what is right ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("model", "engine"), [("plain", "stacked"), ("normed", "one")])
@pytest.mark.parametrize("name", fs.METHODS)
def test_an_example_has_the_form_of_a_real_upload(name: str, model: str, engine: str) -> None:
    """Partial participation: in rounds 2 and 3 some have taken part and others have not."""
    spy = Spy()
    sim = prepared(fs.METHODS[name](), model, participation=0.5, engine=engine)
    found = finish(sim, spy.transport)
    assert not any("rejected" in record for record in found.history)
    down = {(order.round, order.client): order.down for order in spy.orders if order.kind == "train"}
    replies = spy.trained()
    assert len(replies) == 9
    assert len({reply.client for reply in replies}) > 3
    for reply in replies:
        task = dataclasses.replace(sim.task, round=reply.round)
        example = example_upload(sim.method, task, down[reply.round, reply.client])
        assert spec_of(example) == spec_of(reply.up)


def test_what_was_right_a_round_ago_is_not_right_where_the_form_changes() -> None:
    """CD2-pFed shares fewer channels in every round; client 0 is the first that is looked at."""
    first: list[Tree] = []

    def stale(reply: Reply) -> Reply:
        if (reply.kind, reply.client) != ("train", 0):
            return reply
        first.append(tree.clone(reply.up))
        return dataclasses.replace(reply, up=first[0])

    found = finish(prepared(fs.CD2PFed(p=0.9)), Tampered(stale))
    assert [set(record.get("rejected", {})) for record in found.history] == [set(), {"0"}, {"0"}]
    assert "instead of" in found.history[1]["rejected"]["0"]


REPORT = {"loss": 1.0, "steps": 1.0, "samples": 1.0}


@pytest.mark.parametrize(("varies", "rounds"), [(False, [1]), (True, [1, 2])])
def test_an_example_is_made_once_or_once_a_round(varies: bool, rounds: list[int]) -> None:
    made: list[int] = []
    gate, right = Gate(varies), {"params": {"w": torch.ones(2)}}

    def example(reply: Reply) -> Tree:
        made.append(reply.round)
        return right

    for t in (1, 2):
        replies = [Reply("train", t, k, {"params": {"w": torch.full((2,), float(k))}}, REPORT) for k in range(4)]
        assert gate.inspect(replies, example) == (replies, {})
    assert made == rounds
    odd = Reply("train", 2, 7, {"params": {"w": torch.ones(3)}}, REPORT)
    assert gate.inspect([odd, *replies], example) == (replies, {7: "params|w has shape (3,) instead of (2,)"})


def test_differences_are_named_one_at_a_time() -> None:
    right = spec_of({"a": torch.ones(2), "b": {"c": torch.ones(3, dtype=torch.int64)}})
    assert difference(right, right) == ""
    assert difference({}, right) == "a is missing from its upload"
    assert difference({**right, "d": right["a"]}, right) == "d does not belong into its upload"


# ---- a robust mean ---------------------------------------------------------------------------------------------------
def far(models: fs.Run, other: fs.Run) -> float:
    a, b = models.generic(), other.generic()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def garbage(reply: Reply) -> Reply:
    """From one client in every round: finite, of the right form, and huge."""
    if reply.kind != "train" or reply.client != BAD:
        return reply
    g = torch.Generator().manual_seed(reply.round)

    def noise(leaf: torch.Tensor) -> torch.Tensor:
        return 1e6 * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype) if leaf.is_floating_point() else leaf

    return dataclasses.replace(reply, up=tree.map(noise, reply.up))


def test_a_median_outlives_a_client_that_uploads_garbage() -> None:
    honest = finish(prepared(fs.FedAvg(), "plain"))
    bound = max(float(v.abs().max()) for v in honest.generic().values())
    ruined = finish(prepared(fs.FedAvg(), "plain"), Tampered(garbage))
    robust = finish(prepared(fs.FedAvg(), "plain", average=average.median), Tampered(garbage))
    plain = finish(prepared(fs.FedAvg(), "plain", average=average.median))
    assert not any("rejected" in record for record in ruined.history)  # the gate cannot know
    assert far(ruined, honest) > 1000 * bound
    assert far(robust, plain) < 0.5 * bound
    assert far(robust, honest) < bound
    assert all("rejected" not in record for record in robust.history)


def test_the_median_by_hand() -> None:
    trees = [{"a": torch.tensor([x, -x]), "n": torch.tensor(n)} for x, n in ((1.0, 1), (2.0, 5), (90.0, 7), (4.0, 8))]
    of_four, of_three = average.median(trees, [9.0] * 4), average.median(trees[:3], [1.0, 2.0, 3.0])
    assert torch.equal(of_four["a"], torch.tensor([3.0, -3.0]))
    assert of_four["n"] == 6
    assert torch.equal(of_three["a"], torch.tensor([2.0, -2.0]))
    assert (of_three["n"].dtype, int(of_three["n"])) == (torch.int64, 5)


AVERAGING = [name for name in fs.METHODS if fs.METHODS[name].averages]


@pytest.mark.parametrize("name", AVERAGING)
def test_every_method_that_averages_takes_another_mean(name: str) -> None:
    mean, median = (
        finish(prepared(fs.METHODS[name](), rounds=1, epochs=1, average=rule))
        for rule in (average.mean, average.median)
    )
    assert tree.finite(median.server)
    assert mean.history[0]["participants"] == median.history[0]["participants"]
    assert not identical({"": mean.server["params"]}, {"": median.server["params"]})


@pytest.mark.parametrize("name", fs.METHODS)
def test_no_merge_takes_a_mean_of_its_own(name: str) -> None:
    """What servers average, they average by the task's rule."""
    asked: list[int] = []

    def counted(trees, weights, around=None):
        asked.append(len(trees))
        return tree.mean(trees, weights, around)

    method = fs.METHODS[name]
    finish(prepared(method(), "plain", rounds=1, epochs=1, average=counted))
    assert bool(asked) == (name != "local")
    for kind in method.__mro__:
        if "merge" in vars(kind):
            assert "tree.mean" not in inspect.getsource(vars(kind)["merge"])
