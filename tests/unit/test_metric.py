"""Metrics against scikit-learn's, to 1e-9: random and degenerate cases, of one client and pooled over several."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import fedstill as fs
from fedstill.core import objective as objectives
from fedstill.core.errors import InputError
from fedstill.core.metric import METRICS, Measures, Tally, measure_of
from fedstill.core.objective import IGNORED

CLOSE = 1e-9


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def values(objective: objectives.Objective, outputs: np.ndarray, y: np.ndarray, parts: int = 1) -> dict[str, float]:
    """All metrics that the objective has, merged from the statistics of so many clients."""
    names = [name for name, metric in METRICS.items() if objective.name in metric.objectives]
    measures = Measures.of(objective, names, outputs=outputs.shape[-1])
    found = []
    for rows in np.array_split(np.arange(len(y)), parts):
        tally = Tally(measures)
        tally.add(torch.from_numpy(outputs[rows]), torch.from_numpy(y[rows]))
        if len(rows):
            found.append(tally.done()[1])
    return measures.values(measures.merge(found))


def cases(classes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    g = np.random.default_rng(classes)
    normal = g.normal(size=(97, classes)), g.integers(0, classes, 97)
    ties = g.integers(-1, 2, (60, classes)).astype(float), g.integers(0, classes, 60)
    missing = g.normal(size=(40, classes)), g.integers(0, max(1, classes - 1), 40)  # the last class is empty
    one = g.normal(size=(9, classes)), np.full(9, classes - 1)
    constant = np.zeros((12, classes)), g.integers(0, classes, 12)
    single = g.normal(size=(1, classes)), np.zeros(1, np.int64)
    return [normal, ties, missing, one, constant, single]


def undefined(number) -> float:
    """scikit-learn's number; NaN where it warns that there is none, or refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return float(number())
        except (ValueError, UserWarning):
            return math.nan


def by_class(number, y: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """The mean over the classes for which scikit-learn has a number, and the one by their samples."""
    columns = [1] if p.shape[1] == 2 else range(p.shape[1])
    each = np.array([undefined(lambda c=c: number(y == c, p[:, c])) for c in columns])
    support = np.array([(y == c).sum() for c in columns])
    known = ~np.isnan(each)
    if not known.any():
        return math.nan, math.nan
    return float(each[known].mean()), float(np.average(each[known], weights=support[known]))


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("parts", [1, 4])
def test_classes(classes: int, case: int, parts: int) -> None:
    z, y = cases(classes)[case]
    p, found = softmax(z), values(objectives.of("classification", classes), z, y, parts)
    given, onehot = p.argmax(1), np.eye(classes)[y]
    auroc, precision = by_class(sk.roc_auc_score, y, p), by_class(sk.average_precision_score, y, p)
    right = {
        "accuracy": sk.accuracy_score(y, given),
        "balanced_accuracy": sk.recall_score(y, given, labels=np.unique(y), average="macro"),
        "f1": sk.f1_score(y, given, average="macro"),
        "f1_weighted": sk.f1_score(y, given, average="weighted"),
        "auroc": auroc[0],
        "auroc_weighted": auroc[1],
        "average_precision": precision[0],
        "average_precision_weighted": precision[1],
        "brier": np.mean((p[:, 1] - y) ** 2) if classes == 2 else np.mean(((p - onehot) ** 2).sum(1)),
        "log_loss": sk.log_loss(y, p, labels=range(classes)),
        "ece": plain_ece(p.max(1), given == y),
    }
    agree(found, right)
    if case in (0, 1):  # every class is there: scikit-learn's own means over classes
        whole = p[:, 1] if classes == 2 else p
        assert found["auroc"] == pytest.approx(sk.roc_auc_score(y, whole, multi_class="ovr"), abs=CLOSE)
        assert found["average_precision"] == pytest.approx(sk.average_precision_score(y, whole), abs=CLOSE)
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, given), abs=CLOSE)
        assert found["brier"] == pytest.approx(sk.brier_score_loss(y, whole), abs=CLOSE)
        if classes > 2:
            ovr = sk.roc_auc_score(y, p, multi_class="ovr", average="weighted")
            assert found["auroc_weighted"] == pytest.approx(ovr, abs=CLOSE)


def plain_ece(sure: np.ndarray, right: np.ndarray) -> float:
    """Fifteen bins, each open below and closed above, one sample after the other."""
    total = 0.0
    for b in range(15):
        inside = (sure > b / 15) & (sure <= (b + 1) / 15)
        if inside.any():
            total += inside.sum() * abs(sure[inside].mean() - right[inside].mean())
    return total / len(sure)


def agree(found: dict[str, float], right: dict[str, float]) -> None:
    defined = {name: value for name, value in right.items() if math.isfinite(value)}
    assert found.keys() == defined.keys()
    for name, value in defined.items():
        assert found[name] == pytest.approx(value, abs=CLOSE), name


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("outputs", [1, 2])
def test_numbers(outputs: int, parts: int) -> None:
    g = np.random.default_rng(outputs)
    y = 1e4 + g.normal(size=(53, outputs)) * [3.0, 0.1][:outputs]  # a mean far from zero must not cost digits
    f = y + g.normal(size=y.shape)
    found = values(objectives.of("regression", outputs, (outputs,)), f, y, parts)
    assert found == pytest.approx(
        {
            "mae": sk.mean_absolute_error(y, f),
            "rmse": sk.root_mean_squared_error(y, f),
            "r2": sk.r2_score(y, f),
        },
        abs=CLOSE, rel=CLOSE,
    )  # fmt: skip


@pytest.mark.parametrize("y", [[[2.0]], [[2.0], [2.0], [2.0]]])
def test_r2_is_left_out_where_it_is_not_defined(y: list[list[float]]) -> None:
    f = np.array(y) + 1
    found = values(objectives.of("regression", 1, (1,)), f, np.array(y))
    assert found == {"mae": 1.0, "rmse": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not math.isfinite(sk.r2_score(y, f, force_finite=False))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("case", ["random", "empty label", "one sample"])
def test_labels(case: str, parts: int) -> None:
    g = np.random.default_rng(5)
    n = 1 if case == "one sample" else 41
    z, y = g.normal(size=(n, 4)), (g.random((n, 4)) < 0.4).astype(float)
    if case == "empty label":
        y[:, 2], z[:, 2] = 0, -1
    p, given = 1 / (1 + np.exp(-z)), z > 0
    found = values(objectives.of("multilabel", 4, (4,)), z, y, parts)
    auroc, precision = (
        np.array([undefined(lambda c=c, number=number: number(y[:, c], p[:, c])) for c in range(4)])
        for number in (sk.roc_auc_score, sk.average_precision_score)
    )
    support = y.sum(0)

    def mean(each: np.ndarray, weights: np.ndarray) -> float:
        known = ~np.isnan(each)
        return float(np.average(each[known], weights=weights[known])) if weights[known].sum() else math.nan

    right = {
        "subset_accuracy": sk.accuracy_score(y, given),
        "f1": sk.f1_score(y, given, average="macro", zero_division=np.nan),
        "f1_weighted": sk.f1_score(y, given, average="weighted", zero_division=np.nan),
        "auroc": mean(auroc, np.ones(4)),
        "auroc_weighted": mean(auroc, support),
        "average_precision": mean(precision, np.ones(4)),
        "average_precision_weighted": mean(precision, support),
        "brier": np.mean([sk.brier_score_loss(y[:, c], p[:, c], pos_label=1) for c in range(4)]),
        "log_loss": np.mean([sk.log_loss(y[:, c], p[:, c], labels=[0, 1]) for c in range(4)]),
        "ece": plain_ece(np.maximum(p, 1 - p).ravel(), (given == (y > 0)).ravel()),
    }
    agree(found, right)


def test_tokens_count_as_samples_of_their_own() -> None:
    g = np.random.default_rng(3)
    z, y = g.normal(size=(11, 5, 4)), g.integers(0, 4, (11, 5))
    y[g.random(y.shape) < 0.3] = IGNORED
    y[:, 0] = 1
    found = values(objectives.of("tokens", 4, (5,)), z, y, 3)
    real = y != IGNORED
    one = values(objectives.of("classification", 4), z[real], y[real])
    perplexity = found.pop("perplexity")
    assert found == pytest.approx({name: one[name] for name in found}, abs=CLOSE)
    assert perplexity == pytest.approx(np.exp(sk.log_loss(y[real], softmax(z[real]), labels=range(4))), abs=CLOSE)


def test_a_client_without_the_metric_is_left_out_and_counted() -> None:
    """One client has one class alone: it has no AUROC, and the mean is that of the others."""
    g = np.random.default_rng(0)
    clients = [(g.normal(size=(6, 3)), np.arange(6) % 2, g.normal(size=(4, 3)), np.arange(4) % 2) for _ in range(3)]
    clients[1] = (*clients[1][:3], np.zeros(4, int))
    fed = fs.Federation.from_arrays(clients, labels=("healthy", "ill"))
    run = fs.simulate(
        fs.Ditto(), model=torch.nn.Linear(3, 2), data=fed, rounds=2, metrics=["auroc", "f1"], engine="one",
        score_metric="auroc", dtype="float64",
    )  # fmt: skip
    last = run.history[-1]
    assert set(last["personal_auroc_clients"]) == {"0", "2"}
    assert last["personal_auroc_left_out"] == 1
    own = []
    for k in (0, 2):
        net = torch.nn.Linear(3, 2, dtype=torch.float64)
        net.load_state_dict(run.personal(k))
        own.append(sk.roc_auc_score(clients[k][3], net(torch.from_numpy(clients[k][2])).softmax(1)[:, 1].detach()))
        assert last["personal_auroc_clients"][str(k)] == pytest.approx(own[-1], abs=CLOSE)
    assert last["personal_auroc"] == run.score(metric="auroc") == pytest.approx(np.mean(own), abs=CLOSE)
    net.load_state_dict(run.generic())
    tests = np.concatenate([c[2] for c in clients]), np.concatenate([c[3] for c in clients])
    p = net(torch.from_numpy(tests[0])).softmax(1).detach().numpy()
    assert last["generic_auroc"] == pytest.approx(sk.roc_auc_score(tests[1], p[:, 1]), abs=CLOSE)
    assert run.score(model="generic", metric="auroc", mean="pooled") == last["generic_auroc"]
    assert set(last["generic_f1_by_class"]) == {"healthy", "ill"}
    assert last["generic_f1_by_class"]["ill"] == pytest.approx(sk.f1_score(tests[1], p.argmax(1)), abs=CLOSE)
    with pytest.raises(InputError, match="metric = 'ece': should be a metric that this run computed"):
        run.score(metric="ece")


def shrug(y: np.ndarray, p: np.ndarray) -> float:
    """The share of predictions that are not sure of anything."""
    return float((p.max(1) < 0.6).mean()) if len(set(y.tolist())) > 1 else math.nan


shrug.lower = True


def test_a_metric_of_ones_own() -> None:
    g = np.random.default_rng(0)
    clients = [(g.normal(size=(6, 3)), np.arange(6) % 2, g.normal(size=(4, 3)), np.arange(4) % 2) for _ in range(2)]
    fed = fs.Federation.from_arrays(clients)
    run = fs.simulate(
        fs.FedAvg(), model=torch.nn.Linear(3, 2), data=fed, rounds=2, metrics=[shrug, "brier"], engine="one"
    )
    last = run.history[-1]
    assert last["lower"] == ["shrug"]
    assert last["personal_shrug_worst"] == max(last["personal_shrug_clients"].values())
    assert run.score(metric="shrug", round="best-test") == min(r["personal_shrug"] for r in run.history)
    net = torch.nn.Linear(3, 2)
    net.load_state_dict(run.generic())
    p = net(torch.from_numpy(np.concatenate([c[2] for c in clients])).float()).softmax(1)
    assert last["generic_shrug"] == pytest.approx(float((p.max(1)[0] < 0.6).double().mean()))

    def broken(y: np.ndarray, p: np.ndarray) -> float:
        raise KeyError("what?")

    with pytest.raises(InputError, match=r"metrics = 'broken': should be a function .*KeyError"):
        fs.simulate(fs.FedAvg(), model=torch.nn.Linear(3, 2), data=fed, rounds=1, metrics=[broken], engine="one")


def f1(y: np.ndarray, p: np.ndarray) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        (["aurok"], r"'auroc'\?"),
        (["rmse"], "one that classification has"),
        ("mae", "one that classification has"),
        ([f1], "a name of its own"),
        ([shrug, shrug], "different names"),
        ([lambda y, p: 0.0], "a name of its own"),
    ],
)
def test_metrics_are_refused_in_one_line(metrics: list[str], says: str) -> None:
    fed = fs.Federation.from_arrays([(np.ones((2, 3)), [0, 1], np.ones((1, 3)), [0])])
    with pytest.raises(InputError, match=says):
        fs.simulate(fs.FedAvg(), model=torch.nn.Linear(3, 2), data=fed, metrics=metrics)


def test_how_numbers_are_read() -> None:
    assert measure_of("").text(0.98765) == "98.77"
    mae = measure_of("", {"metric": "mae"})
    assert mae.lower
    assert mae.words(12.345678) == "MAE 12.35"
    assert mae.better(1.0, 2.0)
    assert not measure_of("f1").better(0.1, 0.2)
    assert measure_of("gini", {"lower": ["gini"]}).lower
