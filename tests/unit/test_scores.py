"""The further scores, against slow oracles: plain modules, `load_state_dict`, torch's own SGD."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill import scores
from fedstill.core.plan import Plan
from fedstill.data import Dataset
from fedstill.report import figures, text
from fedstill.report.local_work import without_effect, work
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.scores import ensemble
from tests.problems import CLASSES, SETTINGS, Plain, distance, identical, make, ragged, run, states

SIZES = ((13, 41), (7, 30), (1, 22), (10, 35), (5, 17))
METHODS = [fs.PFedSD(), fs.FedRep(), fs.FedAvg(), fs.Local()]
IDS = [method.id for method in METHODS]


def federation(common: bool = False) -> fs.Federation:
    """The shared problem with more tests, so that an accuracy tells models apart."""
    data = ragged(SIZES)
    if not common:
        return data
    g = np.random.default_rng(9)
    return dataclasses.replace(
        data, test=(torch.from_numpy(g.normal(size=(60, 4))), torch.from_numpy(g.integers(0, CLASSES, 60)))
    )


def outputs(state: dict, x: torch.Tensor, model: str = "plain") -> torch.Tensor:
    """A plain module's output for a state dict."""
    module = make(model)
    module.load_state_dict(state)
    with torch.no_grad():
        return module.eval()(x.double())


def accuracy(state: dict, x: torch.Tensor, y: torch.Tensor, model: str = "plain") -> float:
    return float((outputs(state, x, model).argmax(-1) == y).double().mean())


def union(data: fs.Federation, clients=None) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = [data.clients[k] for k in (range(len(data)) if clients is None else clients)]
    return torch.cat([c.x_test for c in chosen]), torch.cat([c.y_test for c in chosen])


def vote(found: fs.Run, x: torch.Tensor, y: torch.Tensor, clients, model: str = "plain") -> float:
    """The ensemble with everything held at once."""
    votes = torch.stack([outputs(found.personal(k), x, model).softmax(-1) for k in clients]).mean(0)
    return float((votes.argmax(-1) == y).double().mean())


# ---- New and External ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("model", ["plain", "normed"])
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_new_is_the_vote_of_all_models_on_all_tests(method, model, engine) -> None:
    data = federation(common=True)
    found = run(method, model, data, engine=engine)
    assert found.new() == pytest.approx(vote(found, *union(data), range(5), model))
    assert found.new("common") == pytest.approx(vote(found, *data.test, range(5), model))


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_blocks_and_stacks_do_not_show(engine, monkeypatch) -> None:
    found = run(fs.PFedSD(), data=federation(), engine=engine)
    whole = found.new()
    shapes = []
    plain = ensemble._ensemble
    monkeypatch.setattr(ensemble, "VOTES", 20 * CLASSES)
    monkeypatch.setattr(ensemble, "STACK", 2)
    monkeypatch.setattr(ensemble, "CHUNK", 7)
    monkeypatch.setattr(ensemble, "_ensemble", lambda run, x: shapes.append(len(x)) or plain(run, x))
    assert found.new() == whole
    assert max(shapes) == 20
    assert sum(shapes) == sum(tests for _, tests in SIZES)


def test_a_thousand_clients_are_never_held_together(monkeypatch) -> None:
    data = ragged(((2, 2),) * 1000)
    found = run(fs.Local(), data=data, participation=0.01, rounds=1, epochs=1, engine="stacked", eval_every=1)
    made = []
    stack = ensemble.tree.stack
    monkeypatch.setattr(ensemble.tree, "stack", lambda trees: made.append(len(trees)) or stack(trees))
    assert 0 <= found.new() <= 1
    assert max(made) == ensemble.STACK


def test_new_refuses_what_is_not_there() -> None:
    found = run(fs.FedAvg(), rounds=1)
    with pytest.raises(fs.InputError, match="no common test set"):
        found.new("common")
    with pytest.raises(fs.InputError, match="'clients' or 'common'"):
        found.new("all")  # type: ignore[arg-type]


def other(count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(4)
    return g.normal(size=(count, 4)), g.integers(0, CLASSES, count)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_external_is_the_same_on_other_data(method) -> None:
    found = run(method, data=federation())
    x, y = map(torch.from_numpy, other())
    assert found.external((x, y)) == pytest.approx(vote(found, x, y, range(5)))
    if "generic" in method.scores:
        assert found.external((x, y), model="generic") == pytest.approx(accuracy(found.generic(), x, y))
    else:
        with pytest.raises(fs.InputError, match="trains no generic model"):
            found.external((x, y), model="generic")


def images(labels=("a", "b", "c"), name="theirs", classes=CLASSES, shape=(1, 2, 2), **more) -> Dataset:
    g = np.random.default_rng(len(name))
    x = g.integers(0, 256, (40, *shape)).astype(np.uint8)
    return Dataset(name, x, g.integers(0, classes, 40), classes, labels=labels, **more)


def test_an_external_data_set_is_normalised_as_the_federation_s_and_read_whole() -> None:
    own = images(name="own", mean=(0.4,), std=(0.3,))
    data = fs.Federation.from_dataset(own, partition="iid", clients=3)
    theirs = images(mean=(0.9,), std=(0.1,), test_x=images(name="tests").x, test_y=images(name="tests").y)
    found = run(fs.Local(), "convolved", data)
    x = torch.from_numpy(np.concatenate([theirs.x, theirs.test_x])).double()
    x = (x / 255 - 0.4) / 0.3
    y = torch.from_numpy(np.concatenate([theirs.y, theirs.test_y]))
    assert found.external(theirs) == pytest.approx(vote(found, x, y, range(3), "convolved"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (images(classes=4, labels=()), "4 classes.*of 3 classes as own is"),
        (images(shape=(1, 3, 3)), "1×3×3.*1×2×2 as own is"),
        (images(labels=("a", "x", "c")), "a class 'x'.*'b' there"),
        ((np.zeros((3, 1, 2, 2)), np.array([0, 1, 3])), "below 3"),
        ((np.zeros((3, 5)), np.array([0, 1, 2])), "samples of shape 5"),
        (np.zeros((3, 5)), "a Dataset or"),
    ],
)
def test_external_data_that_does_not_fit_is_refused(data, says: str) -> None:
    own = fs.Federation.from_dataset(images(name="own"), partition="iid", clients=3)
    with pytest.raises(fs.InputError, match=says):
        scores.Samples.of(own).read(data)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        ("digits", "digits", True),
        ("digits", "mnist", False),
        ("mnist@28", "usps+mnist@28", True),
        ("svhn", "usps+mnist@28", False),
        ("/data/x+y@8#c", "/data/x+z@8", False),
        ("/data/x@8#c", "/data/x@8", True),
        ("/data/x@8", "/data/x@8#c", True),
        ("/data/x@8#c", "/data/x@8#a,b", False),
        ("/data/x@8#b, c", "/data/x#a,b", True),
    ],
)
def test_which_sources_share_samples(a: str, b: str, shared: bool) -> None:
    assert scores.external.overlap(a, b) is shared


# ---- averaged --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["plain", "normed"])
@pytest.mark.parametrize("mean", ["weighted", "uniform"])
@pytest.mark.parametrize("method", [fs.Local(), fs.FedRep(), fs.FedBSD()], ids=["local", "fedrep", "fedbsd"])
def test_averaged_is_the_mean_of_the_personal_weights(method, mean, model) -> None:
    data = federation(common=True)
    found = run(method, model, data)
    weights = [n if mean == "weighted" else 1 for n, _ in SIZES]
    models = [found.personal(k) for k in range(5)]
    average = {
        name: sum(w / sum(weights) * m[name].double() for w, m in zip(weights, models, strict=True))
        for name in models[0]
    }
    assert found.averaged(mean=mean) == pytest.approx(accuracy(average, *union(data), model))
    assert found.averaged("common", mean=mean) == pytest.approx(accuracy(average, *data.test, model))


# ---- +FT and newcomers -----------------------------------------------------------------------------------------------
def trained(state: dict, client: fs.data.Client, epochs: int, part: str) -> dict:
    """Full-batch SGD by torch itself, with the shared problem's settings."""
    module = make("plain")
    module.load_state_dict(state)
    moving = list(module.fc2.parameters() if part == "head" else module.parameters())
    sgd = torch.optim.SGD(moving, lr=SETTINGS["lr"], momentum=SETTINGS["momentum"], weight_decay=1e-3)
    for _ in range(epochs):
        sgd.zero_grad()
        nn.functional.cross_entropy(module(client.x_train), client.y_train).backward()
        sgd.step()
    return copy.deepcopy(module.state_dict())


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("part", ["head", "all"])
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_fine_tuning_trains_each_client_s_model_on(method, part, engine) -> None:
    data = federation()
    found = run(method, data=data, batch_size=100, engine=engine, fine_tune=7, fine_tune_part=part)
    before = states(found)
    rates = [accuracy(trained(found.personal(k), c, 7, part), c.x_test, c.y_test) for k, c in enumerate(data.clients)]
    assert found.after["fine_tuned_clients"] == pytest.approx({str(k): r for k, r in enumerate(rates)})
    assert found.after["fine_tuned"] == found.fine_tuned(7, part) == pytest.approx(np.mean(rates))
    sizes = [tests for _, tests in SIZES]
    assert found.fine_tuned(7, part, mean="sample") == pytest.approx(np.average(rates, weights=sizes))
    assert identical(states(found), before)


def test_fine_tuning_is_by_batches_in_cohorts_and_repeats() -> None:
    one, stacked, grouped = (
        run(fs.PFedSD(), "normed", federation(), fine_tune=3, **how).after
        for how in ({}, {"engine": "stacked"}, {"engine": "stacked", "cohort": 2})
    )
    assert one == run(fs.PFedSD(), "normed", federation(), fine_tune=3).after
    assert one == stacked == grouped  # counts of right answers, so equal to the bit


def test_fine_tuning_the_head_wants_a_head() -> None:
    headless = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    with pytest.raises(fs.InputError, match="head"):
        fs.simulate(fs.FedAvg(), model=headless, data=ragged(), fine_tune=1, rounds=1)
    found = fs.simulate(fs.FedAvg(), model=headless, data=ragged(), fine_tune=1, fine_tune_part="all", rounds=1)
    assert "fine_tuned" in found.after
    for bad in ({"epochs": 0}, {"epochs": 1, "part": "tail"}):
        with pytest.raises(fs.InputError):
            found.fine_tuned(**bad)


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_newcomers_stay_away_and_join_afterwards(method, engine) -> None:
    data = federation()
    found = run(method, data=data, batch_size=100, newcomers=2, join_epochs=4, new=True, engine=engine)
    assert len(found.newcomers) == 2
    assert sorted([*found.clients, *found.newcomers]) == list(range(5))
    for record in found.history:
        assert not set(record["participants"]) & set(found.newcomers)
        assert set(record["personal_clients"]) == set(record["samples"]) == {str(k) for k in found.clients}
    theirs = {k: data.clients[k] for k in found.newcomers}
    before = {str(k): accuracy(found.personal(k), c.x_test, c.y_test) for k, c in theirs.items()}
    after = {str(k): accuracy(trained(found.personal(k), c, 4, "all"), c.x_test, c.y_test) for k, c in theirs.items()}
    assert found.after["newcomers_before_clients"] == pytest.approx(before)
    assert found.after["newcomers_after_clients"] == pytest.approx(after)
    sizes = [SIZES[k][0] for k in found.newcomers]  # training samples
    assert sizes[0] != sizes[1]
    weighted = tuple(np.average(list(rates.values()), weights=sizes) for rates in (before, after))
    assert found.joined(4) == pytest.approx(weighted)
    assert (found.after["newcomers_before"], found.after["newcomers_after"]) == pytest.approx(weighted)
    assert found.new() == pytest.approx(vote(found, *union(data, found.clients), found.clients))
    assert "all clients: the 3 that train; " in found.table()


@pytest.mark.parametrize("method", [*METHODS, fs.SCAFFOLD(), fs.PFedSD(stateless=True)])
def test_training_with_newcomers_is_training_without_their_data(method) -> None:
    seed = next(s for s in range(100) if scores.newcomers(Plan(s, 4), 5, 1) == (4,))
    with_them = run(method, data=ragged(SIZES), seed=seed, newcomers=1)
    assert with_them.newcomers == (4,)
    four = ragged(SIZES)
    without = run(method, data=dataclasses.replace(four, clients=four.clients[:4]), seed=seed)
    mine, theirs = states(with_them), states(without)
    assert identical({name: mine[name] for name in theirs}, theirs)


def test_newcomers_are_drawn_by_the_seed_alone() -> None:
    drawn = [scores.newcomers(Plan(seed, 4), 50, 10) for seed in range(20)]
    assert all(len(set(k)) == 10 and k == tuple(sorted(k)) for k in drawn)
    assert len(set(drawn)) == 20
    assert set(scores.newcomers(Plan(3, 4), 50, 5)) < set(drawn[3])
    assert scores.newcomers(Plan(0, 9), 50, 0) == ()
    with pytest.raises(fs.InputError, match="newcomers = 5: should be at most 4"):
        run(fs.FedAvg(), newcomers=5)
    with pytest.raises(fs.InputError, match="all clients of this run took part"):
        run(fs.FedAvg(), rounds=1).joined()


# ---- the forgetting gap ----------------------------------------------------------------------------------------------
def gaps(method: fs.Method, data: fs.Federation, rounds: int) -> list[float | None]:
    """By shorter runs of pFedSD, whose v_k is what a client trained last: before each round, v_k against the download."""
    found: list[float | None] = [None]
    for t in range(2, rounds + 1):
        past = run(method, data=data, rounds=t - 1)
        seen = {k for record in past.history for k in record["participants"]}
        now = run(method, data=data, rounds=t).history[-1]["participants"]
        apart = []
        for k in set(now) & seen:
            c = data.clients[k]
            apart.append(accuracy(past.personal(k), c.x_test, c.y_test) - accuracy(past.generic(), c.x_test, c.y_test))
        found.append(float(np.mean(apart)) if apart else None)
    return found


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", [fs.PFedSD(), fs.PFedSD(lam=0.0, mean="weighted")], ids=["pfedsd", "as fedavg"])
def test_forgetting_is_the_last_own_model_against_the_download(method, engine) -> None:
    data = federation()
    expected = gaps(method, data, 5)
    assert any(expected)
    found = run(method, data=data, rounds=5, forgetting=True, engine=engine)
    assert [record.get("forgetting") for record in found.history] == pytest.approx(expected)
    if method.lam == 0:  # the same training: FedAvg has no personal model, and yet forgets what it trained
        plain = run(fs.FedAvg(), data=data, rounds=5, forgetting=True, engine=engine)
        assert [record.get("forgetting") for record in plain.history] == pytest.approx(expected)


ALL = [*METHODS, fs.SCAFFOLD(), fs.FedProx(), fs.FedBSD(), fs.PFedKDWCL(), fs.CD2PFed(), fs.SpectralCoDistillation()]


@pytest.mark.parametrize("method", ALL, ids=[method.id for method in ALL])
def test_watching_changes_nothing(method) -> None:
    plain, watched = run(method), run(method, forgetting=True)
    assert identical(states(plain), states(watched))
    assert distance(states(plain), states(run(method, forgetting=True, engine="stacked"))) < 1e-9
    assert all(set(r["trained_clients"]) == {str(k) for k in r["participants"]} for r in watched.history)


def test_watching_does_not_hide_that_training_diverges() -> None:
    """The watch scores models whose weights are no longer finite; the run must still stop."""
    for engine in ("one", "stacked"):
        with pytest.raises(fs.TrainingError, match=r"round \d+, client \d+: (the training loss|weights)"):
            run(fs.FedAvg(), forgetting=True, lr=1e200, engine=engine)
        overflow = {"lr": 1e300, "epochs": 1, "batch_size": 100, "momentum": 0.0, "weight_decay": 1e10}
        with pytest.raises(fs.TrainingError, match="weights are no longer finite"):  # behind a finite loss
            run(fs.FedAvg(), forgetting=True, rounds=1, engine=engine, **overflow)


def test_what_sends_nothing_forgets_nothing() -> None:
    found = run(fs.Local(), data=federation(), rounds=4, forgetting=True)
    assert [record["forgetting"] for record in found.history if "forgetting" in record] == [0.0, 0.0, 0.0]


def test_fedrep_s_download_is_the_received_body_under_its_own_head() -> None:
    data = federation()
    found = run(fs.FedRep(), data=data, rounds=2, participation=1.0, forgetting=True)
    past = run(fs.FedRep(), data=data, rounds=1, participation=1.0)
    expected = {str(k): accuracy(past.personal(k), c.x_test, c.y_test) for k, c in enumerate(data.clients)}
    assert found.history[1]["downloaded_clients"] == pytest.approx(expected)


def test_a_resumed_run_forgets_as_one_that_never_stopped(tmp_path) -> None:
    experiment = fs.Experiment(
        method=fs.FedAvg(), rounds=4, clients=5, epochs=1, participation=0.6, forgetting=True, checkpoint_every=2,
        newcomers=1, new=True,
    )  # fmt: skip
    whole = fs.run(experiment)

    class Stop(Exception):
        pass

    def stop(record: dict) -> None:
        if record["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        fs.run(experiment, out=tmp_path / "run", progress=stop)
    on = fs.resume(tmp_path / "run")
    bare = [[{k: v for k, v in r.items() if "seconds" not in k} for r in run.history] for run in (whole, on)]
    assert bare[0] == bare[1]
    assert whole.after == on.after
    assert (tmp_path / "run" / "scores.json").exists()


# ---- generic and common ----------------------------------------------------------------------------------------------
def test_generic_is_on_all_tests_and_the_common_set_has_its_own_number() -> None:
    data = federation(common=True)
    found = run(fs.PFedSD(), data=data)
    last = found.history[-1]
    assert last["generic"] == pytest.approx(accuracy(found.generic(), *union(data)))
    assert last["generic_common"] == pytest.approx(accuracy(found.generic(), *data.test))
    assert found.score(model="generic", mean="sample") == pytest.approx(last["generic"])
    assert found.score(model="generic") == pytest.approx(last["generic_client"])
    assert found.score(model="generic", clients="common") == last["generic_common"]
    best = max(record["generic_common"] for record in found.history)
    assert found.score(model="generic", clients="common", round="best-test") == best
    row = text.rows([found])[0]
    assert row.generic is not None
    assert row.generic.value == last["generic_common"]
    assert "generic %: the one model for everybody, on the common test set" in found.table()


def test_without_a_common_set_the_table_says_so() -> None:
    found = run(fs.FedAvg())
    assert "generic %: the one model for everybody, on all clients' test samples" in found.table()
    with pytest.raises(fs.InputError, match="no common test set"):
        found.score(model="generic", clients="common")
    with pytest.raises(fs.InputError, match="'generic' on the common test set"):
        fs.Evaluation(clients="common")
    assert str(fs.Evaluation(model="generic", clients="common")) == "generic model, common test set, last round"


def test_averaged_stands_under_generic_only_where_asked() -> None:
    data = federation(common=True)
    assert text.rows([run(fs.Local(), data=data)])[0].generic is None
    asked = [run(fs.Local(), data=data, averaged=True), run(fs.FedAvg(), data=data, averaged=True)]
    local = next(row for row in text.rows(asked) if row.label == "local")
    assert local.generic is not None
    assert local.generic.value == asked[0].averaged("common")
    table = text.table(asked)
    assert "generic % of local: no such model: the mean of the personal weights" in table
    assert "generic % of fedavg: the one model for everybody, on the common test set" in table
    assert "averaged" not in asked[1].after


# ---- what is said of local work --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "says"),
    [
        (fs.FedAvg(), "2"),
        (fs.FedRep(), "10 (head) + 1 (body)"),
        (fs.FedBSD(head_epochs=3), "3 (head) + 1 (body)"),
        (fs.SpectralCoDistillation(), "1 + 3 (personal)"),
    ],
)
def test_local_epochs_are_the_method_s_own(method, says: str) -> None:
    found = run(method, rounds=1)
    assert work(method, found.task, found.training) == says
    assert f"participation 0.6, {says} local epochs, batch 4" in found.table()


def test_a_table_of_several_says_whose_epochs_and_momentum() -> None:
    table = text.table([run(method, rounds=1) for method in (fs.FedAvg(), fs.FedRep(), fs.SCAFFOLD())])
    assert "local epochs (2 for " in table
    assert "10 (head) + 1 (body) for fedrep)" in table
    assert "momentum 0.9; 0 for scaffold" in table


def test_flags_without_effect_are_named() -> None:
    def ignored(method: fs.Method, *given: str) -> list[tuple[str, str]]:
        ready = simulation.prepare(method, Plain(), ragged(), None, Training())
        return without_effect(method, ready.trainer.bench.task, ready.training, given)

    assert ignored(fs.FedRep(), "epochs", "lr") == [("epochs", "on fedrep: its own are 10 (head) + 1 (body)")]
    assert ignored(fs.SCAFFOLD(), "momentum", "epochs") == [("momentum", "on scaffold: its momentum is 0")]
    assert ignored(fs.FedAvg(), "epochs", "momentum", "lr", "nesterov") == []


def test_the_picture_has_a_panel_for_forgetting(tmp_path, monkeypatch) -> None:
    runs = {"fedavg": [run(fs.FedAvg(), forgetting=True, seed=s) for s in (1, 2)], "local": [run(fs.Local())]}
    drawn = []
    save = figures.save
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or save(figure, path))
    figures.compare_figure(runs, tmp_path / "f.png")
    panel = drawn[0].axes[2]
    assert "Forgetting" in panel.get_title(loc="left")
    line = panel.get_lines()[0]
    first, second = ({r["round"]: r["forgetting"] for r in run.history if "forgetting" in r} for run in runs["fedavg"])
    both = [t for t in first if t in second]
    assert both
    for t in both:
        height = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))[t]
        assert height == pytest.approx(50 * (first[t] + second[t]))
    figures.compare_figure({"local": runs["local"]}, tmp_path / "g.png")
    assert len(drawn[1].axes) == 2
