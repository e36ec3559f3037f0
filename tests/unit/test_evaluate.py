"""The evaluation contract, by numbers worked out on paper."""

import pytest

import fedstill as fs
from fedstill.server.records import Scores, summary, worst_tenth

HISTORY = [
    {
        "round": 1,
        "participants": [0, 1],
        **summary(Scores([0, 1, 2], [10, 10, 80], {"personal": [9, 5, 8], "generic": [1, 1, 8]})),
    },
    {"round": 2, "participants": [2]},
    {
        "round": 3,
        "participants": [1, 2],
        **summary(Scores([0, 1, 2], [10, 10, 80], {"personal": [5, 5, 16], "generic": [2, 2, 16]})),
    },
]


def test_a_round_s_numbers() -> None:
    first = HISTORY[0]
    assert first["personal"] == pytest.approx((0.9 + 0.5 + 0.1) / 3)
    assert first["personal_sample"] == pytest.approx(22 / 100)
    assert first["personal_std"] == pytest.approx(((0.4**2 + 0 + 0.4**2) / 3) ** 0.5)
    assert first["personal_worst"] == pytest.approx(0.1)
    assert first["generic"] == pytest.approx(10 / 100)
    assert first["generic_client"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ({}, 0.4),  # last round: (0.5 + 0.5 + 0.2) / 3
        ({"mean": "sample"}, 26 / 100),
        ({"clients": "participants"}, (0.5 + 0.2) / 2),
        ({"clients": "participants", "mean": "sample"}, (5 + 16) / 90),
        ({"round": "best-test"}, 0.5),
        ({"round": "mean10"}, 0.45),
        ({"model": "generic"}, 0.2),
    ],
)
def test_the_contract(contract: dict, expected: float) -> None:
    assert fs.Evaluation(**contract).of(HISTORY) == pytest.approx(expected)


def test_a_round_whose_participants_have_no_such_metric_is_passed_over() -> None:
    """AUROC is defined where a client's tests have more than one class: here for client 1 alone."""
    history: list[dict] = [
        {"round": t, "participants": [k], "samples": {"0": 5, "1": 5},
         "personal_clients": {"0": 0.5, "1": 0.5}, "personal_auroc_clients": {"1": auroc}}
        for t, k, auroc in ((1, 1, 0.7), (2, 1, 0.6), (3, 0, 0.9))
    ]  # fmt: skip
    contract = fs.Evaluation(clients="participants", metric="auroc", round="best-test")
    assert contract.of(history) == 0.7
    assert contract.chooses(history[2]) is None  # as early stopping asks, in the middle of a run
    assert contract.by_round(history) == [(1, 0.7), (2, 0.6)]


def test_best_on_validation_looks_at_validation_only() -> None:
    def record(t: int, val: int, test: int) -> dict:
        return {
            "round": t, "participants": [0],
            **summary(Scores([0], [10], {"personal": [test]})), **summary(Scores([0], [10], {"personal": [val]}), "val_"),
        }  # fmt: skip

    history = [record(1, val=5, test=9), record(2, val=8, test=6), record(3, val=7, test=10)]
    assert fs.Evaluation(round="best-val").of(history) == pytest.approx(0.6)
    with pytest.raises(fs.InputError, match="no validation data"):
        fs.Evaluation(round="best-val").of(HISTORY)


def test_best_on_test_is_labelled_as_what_it_is() -> None:
    assert "ON TEST DATA" in str(fs.Evaluation(round="best-test"))


def test_worst_tenth() -> None:
    assert worst_tenth([i / 100 for i in range(20)]) == pytest.approx(0.005)
    assert worst_tenth([0.3, 0.7]) == pytest.approx(0.3)


def test_a_run_with_validation_data_scores_it() -> None:
    experiment = fs.Experiment(method=fs.FedAvg(), rounds=2, epochs=1, clients=4, partition="iid", split="70/10/20")
    run = fs.run(experiment)
    assert set(run.history[-1]["val_samples"]) == {"0", "1", "2", "3"}
    assert 0 <= run.score(round="best-val") <= 1


def test_the_mean_by_training_size() -> None:
    """The fifth paper's PM: Σ (n_k/n)·acc_k with the training sizes, not those of the tests."""
    sizes = {"0": 30, "1": 10, "2": 60}
    history = [{**record, "train_samples": sizes} for record in HISTORY]
    assert fs.Evaluation(mean="training").of(history) == pytest.approx((0.5 * 30 + 0.5 * 10 + 0.2 * 60) / 100)
    contract = fs.Evaluation(mean="training", clients="participants")
    assert contract.of(history) == pytest.approx((0.5 * 10 + 0.2 * 60) / 70)
    assert "mean by training size" in str(contract)
    with pytest.raises(fs.InputError, match="does not know its training samples"):
        fs.Evaluation(mean="training").of(HISTORY)


def test_a_run_knows_its_training_sizes() -> None:
    run = fs.run(fs.Experiment(method=fs.FedAvg(), rounds=1, epochs=1, clients=4, partition="dirichlet:0.5"))
    sizes = run.data.train.sizes
    rates = run.history[-1]["personal_clients"]
    expected = sum(sizes[k] * rates[str(k)] for k in range(4)) / sum(sizes)
    assert run.score(mean="training") == pytest.approx(expected)
    assert run.score(mean="training") != pytest.approx(run.score())


def test_fedbabus_generic_score_can_be_the_averaged_personal_models() -> None:
    """Nobody trains its head, so the fifth paper brackets its generic model and averages the personal ones."""
    run = fs.run(fs.Experiment(method=fs.FedBABU(), rounds=1, epochs=1, clients=4, averaged=True))
    assert run.after["averaged"] == run.averaged()


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ({}, [0.5, 0.5, 0.2]),
        ({"mean": "sample"}, [0.5, 0.5, 0.2]),  # the mean has no part in one client's accuracy
        ({"round": "mean10"}, [0.7, 0.5, 0.15]),
        ({"round": "best-test"}, [0.9, 0.5, 0.1]),  # round 1, by the mean over clients: 0.5 beside 0.4
        (
            {"round": "best-test", "mean": "sample"},
            [0.5, 0.5, 0.2],
        ),  # round 3, by the mean over samples: 0.26 beside 0.22
        ({"model": "generic"}, [0.2, 0.2, 0.2]),
        ({"clients": "participants"}, None),
        ({"model": "generic", "clients": "common"}, None),
        ({"model": "new"}, None),
        ({"model": "fine-tuned"}, None),  # which this run did not score
        ({"round": "best-val"}, None),
    ],
)
def test_accuracies_by_client_under_a_contract(contract: dict, expected: list[float] | None) -> None:
    found = fs.Evaluation(**contract).of_clients(HISTORY)
    assert found is None if expected is None else list((found or {}).values()) == pytest.approx(expected)
