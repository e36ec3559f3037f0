"""Scores on training data: by a loop over clients in plain torch, equal in both engines, and without effect on training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedstill as fs
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, SIZES, WIRED, cut_and_resumed, finish, identical, make, ragged, rows, run, states

METHODS = [fs.PFedSD(), fs.FedAvg(), fs.FedRep(head_epochs=1), fs.PFedKDWCL()]
ADDED = {"train_loss", "train_loss_clients", "generic_train_loss"}


def by_hand(found: fs.Run, model: str, generic: bool = False) -> tuple[list[float], list[float]]:
    """Each client's mean cross-entropy and accuracy on its training data, with the module itself in evaluation mode."""
    losses, rates = [], []
    for k, client in enumerate(ragged().clients):
        net = make(model)
        net.load_state_dict(found.generic() if generic else found.personal(k))
        net.eval()
        with torch.no_grad():
            logits = net(client.x_train.double())
        losses.append(float(F.cross_entropy(logits, client.y_train)))
        rates.append(float((logits.argmax(1) == client.y_train).double().mean()))
    return losses, rates


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("model", ["plain", "normed"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.id)
def test_they_are_the_modules_own(method: fs.Method, model: str, engine: str) -> None:
    found = run(method, model, engine=engine, train_scores=True)
    last, sizes = found.history[-1], [n for n, _ in SIZES]
    losses, rates = by_hand(found, model)
    assert [last["train_loss_clients"][str(k)] for k in range(len(SIZES))] == pytest.approx(losses, abs=1e-9)
    assert last["train_loss"] == pytest.approx(np.average(losses, weights=sizes), abs=1e-9)
    assert [last["train_personal_clients"][str(k)] for k in range(len(SIZES))] == pytest.approx(rates)
    assert last["train_samples"] == {str(k): n for k, n in enumerate(sizes)}
    if "generic" in method.scores:
        losses, rates = by_hand(found, model, generic=True)
        assert last["generic_train_loss"] == pytest.approx(np.average(losses, weights=sizes), abs=1e-9)
        assert last["train_generic"] == pytest.approx(np.average(rates, weights=sizes))
    else:
        assert "generic_train_loss" not in last
    assert all("train_loss" in record for record in found.history)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.id)
def test_both_engines_agree_and_training_is_the_same(method: fs.Method) -> None:
    one, stacked = (run(method, "normed", engine=engine, train_scores=True) for engine in ("one", "stacked"))
    for a, b in zip(one.history, stacked.history, strict=True):
        for name in ADDED & a.keys():
            assert a[name] == pytest.approx(b[name], abs=1e-10)
    plain = run(method, "normed", engine="one")
    assert identical(states(plain), states(one))
    for a, b in zip(rows(plain.history), rows(one.history), strict=True):
        assert {name: b[name] for name in a} == a


def test_blocks_cohorts_workers_and_the_wire_change_nothing() -> None:
    whole = run(fs.PFedSD(), engine="stacked", train_scores=True)
    in_groups = run(fs.PFedSD(), engine="stacked", train_scores=True, cohort=2)
    for a, b in zip(whole.history, in_groups.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-12)
    two, one = (Training(**SETTINGS, engine="one", train_scores=True, workers=workers) for workers in (2, 1))
    sim, other = (simulation.prepare(fs.PFedSD(), make("plain"), ragged(), None, settings) for settings in (two, one))
    alone = finish(other)
    assert rows(finish(sim).history) == rows(finish(sim, WIRED).history) == rows(alone.history)


def test_resume_and_runs_side_by_side(tmp_path) -> None:
    how = dict(epochs=1, clients=5, batch_size=64, device="cpu", dtype="float64", train_scores=True, split="70/10/20")
    experiment = fs.Experiment(method=fs.PFedSD(), rounds=3, checkpoint_every=1, **how)
    whole, cut = cut_and_resumed(experiment, tmp_path, after=1)
    assert rows(whole.history) == rows(cut.history)
    seeds = [fs.Experiment(method=fs.PFedSD(), rounds=2, seed=seed, engine="stacked", **how) for seed in (0, 1)]
    for together, alone in zip(fs.run_together(seeds), map(fs.run, seeds), strict=True):
        for a, b in zip(together.history, alone.history, strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-10)
            assert {"val_personal", "train_personal"} <= a.keys()


def test_only_where_asked_and_not_where_samples_are_private() -> None:
    assert not ADDED & run(fs.PFedSD(), rounds=1).history[0].keys()
    found = run(fs.PFedSD(), rounds=4, eval_every=2, train_scores=True)
    assert ["train_loss" in record for record in found.history] == [False, True, False, True]
    with pytest.raises(fs.InputError, match="train_scores = True"):
        run(fs.FedAvg(), train_scores=True, privacy="local", participation=1.0)


def test_the_loss_falls_to_that_of_the_optimum() -> None:
    """Softmax regression with full batches: convex, so the loss falls in every round."""
    net = torch.nn.Linear(4, 3).double()
    found = run(fs.FedAvg(), net, rounds=6, batch_size=100, momentum=0.0, participation=1.0, train_scores=True)
    losses = [record["train_loss"] for record in found.history]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01
