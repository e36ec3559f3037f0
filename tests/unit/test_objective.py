"""Objectives: losses and distillation against torch's own, class weights, what targets are taken for, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import distributions as dist

import fedstill as fs
from fedstill.core import objective as objectives
from fedstill.core import terms
from fedstill.core.batch import Batch
from fedstill.core.errors import InputError
from fedstill.core.objective import IGNORED
from fedstill.data import targets
from fedstill.report import robustness
from fedstill.run.evaluate import Evaluation

from ..problems import EAGER, distance, ragged, run, states

G = torch.Generator().manual_seed(0)
Z = torch.randn(6, 4, generator=G, dtype=torch.float64)
T = torch.randn(6, 4, generator=G, dtype=torch.float64)
CLASSES = torch.tensor([0, 3, 1, 1, 2, 0])
LABELS = (torch.rand(6, 4, generator=G) < 0.5).double()
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=torch.float64)
MASK = torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=torch.float64)
REAL = MASK > 0


def batch(y: torch.Tensor, mask: torch.Tensor | None = None) -> Batch:
    return Batch(Z, y, torch.arange(len(y)), torch.tensor(0), mask)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_weighted_and_smoothed_cross_entropy_is_torchs_and_padding_is_left_out(weights, smoothing: float) -> None:
    own = objectives.of("classification", 4, weights="none" if weights is None else "1,2,0.5,4", smoothing=smoothing)
    balance = own.balance(CLASSES)
    right = F.cross_entropy(Z, CLASSES, weights, label_smoothing=smoothing)
    torch.testing.assert_close(own.loss(Z, batch(CLASSES), balance), right)
    right = F.cross_entropy(Z[REAL], CLASSES[REAL], weights, label_smoothing=smoothing)
    torch.testing.assert_close(own.loss(Z, batch(CLASSES, MASK), balance), right)
    torch.testing.assert_close(own.plain_losses(Z, CLASSES), F.cross_entropy(Z, CLASSES, reduction="none"))


def test_labels() -> None:
    own = objectives.of("multilabel", 4, (4,), "1,2,0.5,4", 0.2)
    soft = LABELS * 0.8 + 0.1
    right = F.binary_cross_entropy_with_logits(Z[REAL], soft[REAL], pos_weight=WEIGHTS)
    torch.testing.assert_close(own.loss(Z, batch(LABELS, MASK), own.balance(LABELS)), right)
    tau = 2.0
    right = dist.kl_divergence(dist.Bernoulli(logits=T / tau), dist.Bernoulli(logits=Z / tau))[REAL].mean()
    torch.testing.assert_close(own.distill(T, Z, tau, batch(LABELS, MASK)), right)
    balanced = objectives.of("multilabel", 4, (4,), "balanced").balance(
        torch.tensor([[1.0, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1]])
    )
    assert balanced.tolist() == [1.0, 1.0, 2.0, 0.5]  # zeros over ones; 1 where a client has only one of them


def test_numbers() -> None:
    own = objectives.of("regression", 4, (4,))
    torch.testing.assert_close(own.loss(Z, batch(T, MASK)), F.mse_loss(Z[REAL], T[REAL]))
    torch.testing.assert_close(own.distill(T, Z, 2.0, batch(T)), F.mse_loss(Z / 2, T / 2))
    normal = dist.kl_divergence(dist.Normal(T / 2, 0.5**0.5), dist.Normal(Z / 2, 0.5**0.5)).mean()
    torch.testing.assert_close(own.distill(T, Z, 2.0, batch(T)), normal)


def test_tokens_are_averaged_over_the_batch_as_torch_does() -> None:
    z, t = (v.reshape(3, 2, 4) for v in (Z, T))
    y = torch.tensor([[0, IGNORED], [1, 2], [3, IGNORED]])
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    own = objectives.of("tokens", 4, (2,), "1,2,0.5,4", 0.1)
    right = F.cross_entropy(z[:2].flatten(0, 1), y[:2].flatten(), WEIGHTS, ignore_index=IGNORED, label_smoothing=0.1)
    torch.testing.assert_close(own.loss(z, Batch(z, y, y, y, mask), own.balance(y)), right)
    each = terms.kl_each(t, z, 2.0)[:2]
    torch.testing.assert_close(own.distill(t, z, 2.0, Batch(z, y, y, y, mask)), each[y[:2] != IGNORED].mean())
    assert own.score(z, y).shape == (3,)


def test_balanced_weights_are_scikit_learns_and_of_the_clients_own_classes() -> None:
    own = objectives.of("classification", 5, weights="balanced")
    y = np.array([1, 1, 1, 4, 2, 1])
    right = np.zeros(5)
    right[[1, 2, 4]] = compute_class_weight("balanced", classes=np.array([1, 2, 4]), y=y)
    np.testing.assert_allclose(own.balance(torch.from_numpy(y)).numpy(), right)


def test_fedrod_refuses_to_smooth_targets_over_classes_that_a_client_does_not_have() -> None:
    with pytest.raises(InputError, match=r"^label_smoothing = 0.1: should be 0 for fedrod"):
        run(fs.FedRoD(), label_smoothing=0.1)
    assert run(fs.FedRoD(generic_loss="ce"), label_smoothing=0.1, rounds=1).history


@pytest.mark.parametrize("weights", ["1,2,0.5,4", "10,20,5,40", "balanced"])
def test_the_mean_of_weighted_losses_over_a_clients_samples_is_the_loss(weights: str) -> None:
    own = objectives.of("classification", 4, weights=weights)
    balance = own.balance(CLASSES)
    torch.testing.assert_close(own.each(Z, CLASSES, balance).mean(), own.loss(Z, batch(CLASSES), balance))


def test_dp_sgd_refuses_class_weights_that_leak_or_cancel_out() -> None:
    private = {"privacy": "local", "momentum": 0.0}
    for weights, why in (("balanced", "other samples"), ("1,2,3", "divided by itself")):
        with pytest.raises(InputError, match=f"^class_weights = .*{why}"):
            run(fs.FedAvg(), class_weights=weights, **private)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"class_weights": "1,2"}, "class_weights = '1,2': should be 3 numbers, one for each of the classes"),
        ({"class_weights": "often"}, "class_weights = 'often': should be 'none', 'balanced', or a number above 0"),
        ({"class_weights": "1,0,1"}, "a number above 0"),
    ],
)
def test_wrong_weights_are_refused(settings, says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(fs.FedAvg(), **settings)


@pytest.mark.parametrize(
    ("settings", "model", "compile"),
    [
        ({"class_weights": "balanced"}, "plain", "traced"),
        ({"class_weights": "1,2.5,0.5", "label_smoothing": 0.1}, "normed", "off"),
    ],
)
def test_weights_and_smoothing_stacked_equal_one_and_change_what_is_learned(settings, model: str, compile: str) -> None:
    how = {"rounds": 2, "compile": compile}
    one, stacked = (run(fs.PFedSD(lam=0.5), model, engine=e, **how, **settings) for e in ("one", "stacked"))
    assert distance(states(one), states(stacked)) < 1e-10
    assert distance(states(one), states(run(fs.PFedSD(lam=0.5), model, **how))) > 1e-3


def test_the_fused_loop_leaves_weighted_losses_to_autograd() -> None:
    chain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).double()
    fast, slow = (run(fs.FedAvg(), chain, rounds=1, class_weights="balanced", fast=fast) for fast in (True, False))
    assert distance(states(fast), states(slow)) == 0
    assert distance(states(fast), states(run(fs.FedAvg(), chain, rounds=1))) > 1e-3


# ---- what targets are taken for ----------------------------------------------------------------------------------------
def federation(*ys, **options) -> fs.Federation:
    return fs.Federation.from_arrays([(np.ones((len(y), 2)), y, np.ones((len(y), 2)), y) for y in ys], **options)


@pytest.mark.parametrize(
    ("y", "objective", "classes"),
    [
        (np.array([0, 1, 2]), "classification", 3),
        (np.array([0.0, 1.0, 2.0]), "classification", 3),
        (np.array([0.5, 1.25, -2.0]), "regression", 1),
        (np.array([[0.5], [1.0]]), "regression", 1),
        (np.array([[0.5, 3], [1.0, 2]]), "regression", 2),
        (np.array([[0, 1], [1, 1]]), "multilabel", 2),
        (np.array([[True, False]]), "multilabel", 2),
    ],
)
def test_targets_say_what_they_are_for(y: np.ndarray, objective: str, classes: int) -> None:
    fed = federation(y)
    assert (fed.objective, fed.classes) == (objective, classes)
    assert fed.clients[0].y_train.is_floating_point() == (objective in ("regression", "multilabel"))


@pytest.mark.parametrize(
    ("y", "options", "says"),
    [
        (np.array([[1], [2]]), {}, "one label for each sample, or said with objective"),
        (np.array([[1, 7], [2, 2]]), {}, "one label for each sample, or said with objective"),
        (np.array([[1, -7], [2, 2]]), {"objective": "tokens"}, "the token -7"),
        (np.array([[1, 2], [-100, -100]]), {"objective": "tokens"}, "sample 1 of which no token counts"),
        (np.array([1, 2]), {"objective": "multilabel"}, r"\[n, labels\] for the 2 samples"),
        (np.array([[1, 2]]), {"objective": "multilabel"}, "the label 2"),
        (np.array([1.0, math.nan]), {"objective": "regression"}, "target of sample 1, NaN"),
        (np.array([1.0]), {"objective": "ranking"}, "one of: auto, classification"),
        (np.array([[1.0, 2.0]]), {"classes": 3}, "2 targets a sample"),
    ],
)
def test_targets_that_do_not_fit_are_refused_in_one_line(y: np.ndarray, options, says: str) -> None:
    with pytest.raises(InputError, match=says):
        federation(y, **options)


def test_clients_must_agree() -> None:
    with pytest.raises(InputError, match="1 to 2 targets a sample"):
        federation(np.array([[0.5]]), np.array([[0.5, 0.25]]))
    assert (
        targets.decide("y", [np.array([0, 1])] * 2 + [np.array([0.5, 1])]) == "classification"
    )  # of which one is wrong


def test_what_needs_classes_is_refused() -> None:
    fed = federation(np.array([0.5, 1.25]), np.array([1.5, 2.5]))
    wrong = [{"attack": "label-flip", "attackers": 0.5}, {"class_weights": "balanced"}, {"label_smoothing": 0.1}]
    for settings in [*wrong, {"metrics": ["f1"]}]:
        field = next(iter(settings))
        with pytest.raises(InputError, match=f"^{field} = ") as error:
            fs.simulate(fs.FedAvg(), model=torch.nn.Linear(2, 1), data=fed, rounds=1, **settings)
        assert "regression" in str(error.value)
    with pytest.raises(InputError, match=r"output of shape \[batch, 1\]"):
        fs.simulate(fs.FedAvg(), model=torch.nn.Linear(2, 3), data=fed, rounds=1)


@dataclass(frozen=True, kw_only=True)
class Hand(fs.FedAvg):
    def loss(self, task, params, local, batch):
        return terms.cross_entropy(task.logits(params, batch), batch)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_hook_with_cross_entropy_is_told_what_to_write(engine: str) -> None:
    fed = federation(np.array([0.5, 1.25]), np.array([1.5, 2.5]))
    with pytest.raises(InputError, match=r"terms.cross_entropy = targets of .* task.fit\(outputs, batch\)"):
        fs.simulate(Hand(), model=torch.nn.Linear(2, 1), data=fed, rounds=1, engine=engine)


# ---- less is better ----------------------------------------------------------------------------------------------------
def record(t: int, personal: float, val: float, **more) -> dict:
    each = {"0": personal, "1": 3 * personal}
    return {
        "round": t, "participants": [0, 1], "metric": "mae", "objective": "regression", "samples": {"0": 1, "1": 3},
        "personal_clients": each, "val_personal_clients": dict.fromkeys(each, val), "val_samples": {"0": 1, "1": 1}, **more,
    }  # fmt: skip


HISTORY = [record(1, 5.0, 0.5), record(2, 2.0, 0.9), record(3, 4.0, 0.7)]


def test_the_best_round_is_the_lowest() -> None:
    assert Evaluation(round="best-test").of(HISTORY) == 4.0  # of round 2
    assert Evaluation(round="best-val").of(HISTORY) == 10.0  # of round 1
    assert Evaluation(round="best-test").of_clients(HISTORY) == {"0": 2.0, "1": 6.0}
    assert Evaluation().rounds_to(HISTORY, 4.5) == 2
    assert Evaluation().rounds_to(HISTORY, 1.0) is None
    assert Evaluation(metric="mae", mean="sample").of(HISTORY) == 10.0
    with pytest.raises(InputError, match="a finite number"):
        Evaluation().rounds_to(HISTORY, math.inf)


def test_forgetting_is_an_error_that_grows() -> None:
    fed = federation(np.array([0.5, 1.25, 2.0]), np.array([4.5, 5.25, 5.0]))
    done = fs.simulate(
        fs.FedAvg(), model=lambda: torch.nn.Linear(2, 1), data=fed, rounds=2, forgetting=True, lr=0.1, engine="one"
    )
    first, second = done.history
    gaps = [second["downloaded_clients"][k] - first["trained_clients"][k] for k in ("0", "1")]
    assert second["forgetting"] == pytest.approx(np.mean(gaps))
    assert np.mean(gaps) > 0  # the mean of the two serves them worse


def test_attacked_and_defended_errors_stand_as_errors() -> None:
    fed = federation(*(np.linspace(0.5, 2.25, 8) for _ in range(4)))
    how = {"model": lambda: torch.nn.Linear(2, 1), "data": fed, "rounds": 2, "lr": 0.1, "engine": "one"}
    attacked = {"attack": "sign-flip", "attackers": 0.25}
    done = [fs.simulate(fs.FedAvg(), **how), fs.simulate(fs.FedAvg(), **how, **attacked)]
    (_, names), clean, bad = robustness.columns(done)
    assert names == ["fedavg, generic"]
    assert (clean[0], bad[0]) == ("clean, mean MAE", "sign-flip, mean MAE")
    assert [float(cells[0]) for _, cells in (clean, bad)] == pytest.approx(
        [done[0].score(model="generic", mean="sample"), done[1].score(model="generic", mean="sample")], abs=1e-4
    )


def test_votes_are_averages_of_the_values() -> None:
    fed = federation(np.array([0.5, 1.25, 2.0]), np.array([4.5, 5.25, 5.0]))
    done = fs.simulate(
        fs.Local(), model=lambda: torch.nn.Linear(2, 1), data=fed, rounds=2, lr=0.1, engine="one", dtype="float64"
    )
    net = torch.nn.Linear(2, 1, dtype=torch.float64)
    values = []
    for k in (0, 1):
        net.load_state_dict(done.personal(k))
        values.append(float(net(torch.ones(1, 2, dtype=torch.float64)).detach()))
    y = np.array([0.5, 1.25, 2.0, 4.5, 5.25, 5.0])
    assert done.new() == pytest.approx(np.abs(y - np.mean(values)).mean())


def test_workers_measure_as_this_process_does() -> None:
    data = ragged(((60, 20), (40, 30), (30, 12)))
    metrics = {"metrics": ("auroc", "ece")}
    alone = run(fs.PFedSD(), "plain", data, rounds=2, workers=1, participation=1.0, **metrics)
    pool = run(fs.PFedSD(), "plain", data, {"tuning": EAGER, "workers": 2}, rounds=2, participation=1.0, **metrics)
    for a, b in zip(alone.history, pool.history, strict=True):
        asked = [name for name in a if "auroc" in name or "ece" in name]
        assert len(asked) > 10
        assert [a[name] for name in asked] == [b[name] for name in asked]
