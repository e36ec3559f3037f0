"""What a reproduction chooses, cuts, shares and keeps; nothing here trains."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from fedstill import papers
from fedstill.core import files
from fedstill.core.errors import InputError
from fedstill.data.dataset import Dataset, dataset
from fedstill.methods.pfedsd import PFedSD
from fedstill.papers import Contract
from fedstill.reproduce import filters, layout, quick, score, sources, write
from fedstill.reproduce.plan import find, joined, plan
from fedstill.reproduce.reading import Reading, rankings, read
from fedstill.reproduce.runner import Member, _step_of
from fedstill.reproduce.scale import Scale
from fedstill.reproduce.score import Unscored
from fedstill.reproduce.shelf import Shelf
from fedstill.reproduce.store import RESULT, Result, Store, digest, values_of
from fedstill.reproduce.verdict import Sample, verdict
from fedstill.run.experiment import Experiment

TABLE2 = papers.exhibit("pfedsd/table2")
WHOLE = Scale()


def chosen(only, exhibit=TABLE2):
    return filters.choose(exhibit.cells, only, [cell.experiment() for cell in exhibit.cells])


# ---- which cells -------------------------------------------------------------------------------------------------------
def test_filters_of_different_kinds_must_all_hold():
    (cell,) = chosen("cifar100,100clients,pfedsd")
    assert (cell.setting, cell.method) == ("cifar100-dirichlet-100", "pfedsd")
    assert len(chosen("fmnist")) == 14  # two rows of seven methods
    assert len(chosen("")) == len(TABLE2.cells) == 42


def test_filters_of_one_kind_are_alternatives():
    assert [c.method for c in chosen("fmnist-dirichlet-20,fedavg,pfedsd")] == ["fedavg", "pfedsd"]
    assert len(chosen("cifar10,fmnist,20clients,PFEDSD")) == 2


@pytest.mark.parametrize("word", ["LG-FedAvg", "cifar10-*,fedper", "balanced-dirichlet:0.1", "dirichlet", "cnn-fmnist"])
def test_filters_name_methods_labels_patterns_partitions_and_models(word):
    assert chosen(word)


def test_rows_and_columns_are_filters():
    row = TABLE2.cells[0].row
    assert {c.row for c in chosen(row.split(",")[0] if "," not in row else "fmnist,20clients")} == {row}
    assert {c.column for c in chosen("fedper")} == {"FedPer"}


@pytest.mark.parametrize(
    ("word", "near"), [("cifra100", "cifar100"), ("fedprx", "fedprox"), ("10clients", "100clients")]
)
def test_an_unknown_filter_names_the_nearest(word, near):
    with pytest.raises(InputError, match=f"--only.*{near}"):
        chosen(word)


def test_filters_that_no_cell_has_together_are_refused():
    table = papers.exhibit("pfedsd/table8")
    with pytest.raises(InputError, match="together"):
        filters.choose(table.cells, "resnet8,cifar100-r60-mobilenetv2", [c.experiment() for c in table.cells])


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("pfedds/table2", "pfedsd"),
        ("pfedsd/tabel2", "table2"),
        ("pfedsd/table-2", "table2"),
        ("pfedsd/table99", "table9"),
    ],
)
def test_an_unknown_paper_or_table_names_the_nearest(name, near):
    with pytest.raises(InputError, match=near):
        find([name])


def test_a_paper_is_all_of_its_exhibits():
    assert [e.name for e in find(["pfedsd"])] == [e.name for e in papers.exhibits("pfedsd").values()]
    assert [e.id for e in find(["pfedsd/table5", "pfedsd/table2", "pfedsd/table5"])] == ["table5", "table2"]


# ---- which experiments ---------------------------------------------------------------------------------------------------
def test_each_distinct_experiment_is_run_once():
    # Table 5's means and standard deviations are read off the same runs, which Table 2 shares
    both = plan(find(["pfedsd/table2", "pfedsd/table5"]), "cifar10,pfedsd")
    cells = [cell for part in both.chosen for cell in part.cells]
    assert len(cells) > len(both.wanted)
    assert len({digest(trial.experiment, WHOLE) for trial in both.wanted}) == len(both.wanted)
    by_setting = {cell.setting: both.trial(cell) for cell in both.chosen[0].cells}
    for cell in both.chosen[1].cells:
        if cell.setting in by_setting and not cell.variant:
            assert both.trial(cell) is by_setting[cell.setting]


def test_a_cell_that_compares_brings_its_reference():
    planned = plan(find(["pfedsd/table4"]))
    compared = [cell for part in planned.chosen for cell in part.cells if cell.contract.reference]
    assert compared
    for cell in compared:
        other = planned.reference(cell)
        assert other is not None
        assert other.experiment.method.id == "fedper"
        assert other.experiment.data == planned.trial(cell).experiment.data


def test_scores_that_change_no_training_are_joined():
    plain = Experiment(rounds=5)
    asked = dataclasses.replace(plain, new=True, fine_tune=3)
    assert joined(plain, asked) == asked
    assert joined(asked, dataclasses.replace(plain, averaged=True)) == dataclasses.replace(asked, averaged=True)
    assert joined(asked, dataclasses.replace(plain, fine_tune=4)) is None
    for other in ({"rounds": 6}, {"newcomers": 2}, {"method": PFedSD(lam=0.3)}, {"eval_every": 2}):
        assert joined(plain, dataclasses.replace(plain, **other)) is None


def test_a_run_is_called_by_its_method_and_what_the_variant_sets():
    (trial,) = [t for t in plan(find(["pfedsd/fig8"]), "fmnist/lam-0.1/tau-3", 1).wanted if t.seeds]
    assert trial.label == "fmnist-r60 · pfedsd · lam 0.1 · tau 3.0"
    labels = {t.label for t in plan(find(["pfedsd/table11"]), "pfedsd", 1).wanted}
    assert labels == {"cifar100-r60 · pfedsd · teacher predictions", "cifar100-r60 · pfedsd · teacher model"}
    assert {t.label for t in plan(find(["pfedsd/fig2"]), "", 1).wanted} == {
        "cifar10-dirichlet-100 · fedavg", "cifar100-dirichlet-100 · fedavg",
    }  # fmt: skip


def test_seeds_are_the_papers_or_the_flags():
    assert {t.seeds for t in plan([TABLE2], "fmnist").wanted} == {TABLE2.seeds}
    planned = plan([TABLE2], "fmnist,20clients,fedavg", seeds=2)
    (trial,) = planned.wanted
    assert [trial.seeded(n).seed for n in range(trial.seeds)] == [0, 1]


def test_equal_steps_go_side_by_side():
    # λ and τ are floating fields: the whole grid of Fig. 8 on one data set is one stack; methods are not
    grid = plan(find(["pfedsd/fig8"]), "cifar10").wanted
    assert len(grid) > 3
    assert len({_step_of(t.experiment) for t in grid}) == 1
    assert _step_of(Member(grid[0], 1).experiment) == _step_of(grid[0].experiment)
    methods = plan([TABLE2], "cifar10-dirichlet-20").wanted
    assert len({_step_of(t.experiment) for t in methods}) == len(methods)


# ---- the scale -----------------------------------------------------------------------------------------------------------
def test_a_scale_cuts_rounds_and_clients():
    whole = Experiment(rounds=100, clients=100, participation=0.1, newcomers=20, epochs=5, seed=3)
    cut = Scale(0.3).experiment(whole)
    assert (cut.rounds, cut.clients, cut.newcomers) == (30, 30, 6)
    assert dataclasses.replace(cut, rounds=100, clients=100, newcomers=20) == whole
    small = Scale(0.001).experiment(whole)
    assert (small.rounds, small.clients, small.newcomers) == (2, 20, 4)
    assert Scale(0.5).experiment(Experiment(clients=12, rounds=1)).clients == 12
    assert Scale().experiment(whole) is whole
    for wrong in (0.0, 1.5, -1.0):
        with pytest.raises(InputError, match="--scale"):
            Scale(wrong)


def numbered(count, classes=4, **more):
    """A set whose samples are their own numbers."""
    x = np.arange(count, dtype=np.float32)[:, None]
    return dataset("numbers", "numbers", x, np.arange(count) % classes, classes=classes, **more)


def test_a_scale_cuts_every_class_alike():
    cut = Scale(0.25).dataset(numbered(4000), 10, "dirichlet")
    assert np.bincount(cut.y).tolist() == [250] * 4
    assert "1000 of 4000" in cut.name
    assert (cut.x[:, 0].astype(int) % 4 == cut.y).all()  # labels stay with their samples
    again = Scale(0.25).dataset(numbered(4000), 10, "dirichlet")
    assert (again.x == cut.x).all()


def test_a_client_keeps_fifty_samples():
    assert len(Scale(0.01).dataset(numbered(4000), 20, "dirichlet")) == 1000
    assert len(Scale(0.01).dataset(numbered(400), 20, "dirichlet")) == 400


def test_owners_are_cut_to_the_first():
    owner = np.repeat(np.arange(60), 100)
    data = numbered(6000, owner=owner)
    cut = Scale(0.5).dataset(data, 30, "owner")  # of whom the experiment has 30
    assert sorted(set(cut.owner)) == list(range(30))
    assert np.bincount(cut.owner).tolist() == [52] * 30 or all(48 <= n <= 52 for n in np.bincount(cut.owner))
    assert len(set(Scale(0.1).dataset(data, 0, "owner").owner)) == 20


def test_a_common_test_set_is_cut_too():
    data = numbered(4000, test=(np.zeros((2000, 1), np.float32), np.arange(2000) % 4))
    cut = Scale(0.25).dataset(data, 10, "iid")
    assert np.bincount(cut.test_y).tolist() == [125] * 4


def test_a_named_round_is_scaled():
    history = [
        {"round": t, "personal_clients": {"0": t / 100}, "samples": {"0": 5}, "participants": [0]} for t in range(1, 31)
    ]
    result = Result("x", 0, history=history)
    assert score.number(Contract(round=300), result, Scale(0.1)) == pytest.approx(30)
    with pytest.raises(Unscored, match="no round 300"):
        score.number(Contract(round=300), result, WHOLE)


# ---- what a contract reads ------------------------------------------------------------------------------------------------
def history():
    rates = [{"0": 0.5, "1": 0.1}, {"0": 0.8, "1": 0.4}, {"0": 0.6, "1": 0.6}]
    return [
        {
            "round": t, "personal_clients": r, "generic_clients": {"0": 0.2, "1": 0.3}, "samples": {"0": 30, "1": 10},
            "train_samples": {"0": 10, "1": 90}, "participants": [0], "time": 10.0 * t, "generic_common": 0.25,
        }
        for t, r in enumerate(rates, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("contract", "value"),
    [
        ({}, 60.0),
        ({"round": "best-test", "mean": "sample"}, 70.0),  # (30·80 + 10·40)/40
        ({"round": "mean10"}, 50.0),  # of 30, 60, 60
        ({"round": 2, "mean": "training"}, 44.0),  # 0.1·80 + 0.9·40
        ({"clients": "participants", "round": 2}, 80.0),
        ({"clients": 1, "round": 2}, 40.0),
        ({"model": "generic", "clients": "common"}, 25.0),
        ({"metric": "client-std", "round": "last"}, 0.0),
        ({"metric": "rounds-to-target", "target": 55.0}, 2.0),
    ],
)
def test_contracts(contract, value):
    assert score.number(Contract(**contract), Result("x", 0, history=history()), WHOLE) == pytest.approx(value)


def test_what_is_relative_needs_its_reference():
    slow = [
        {**record, "personal_clients": {"0": 0.2 * record["round"], "1": 0.2 * record["round"]}} for record in history()
    ]
    ours, other = Result("x", 0, history=history()), Result("y", 0, history=slow)
    reference = {"method": "fedper"}
    speed = Contract(metric="rounds-speedup", target=60.0, reference=reference)
    assert score.number(speed, ours, WHOLE, other) == pytest.approx(3 / 2)
    time = Contract(metric="time-speedup", target=60.0, reference=reference)
    assert score.number(time, ours, WHOLE, other) == pytest.approx(30 / 20)
    gain = Contract(metric="improvement", round=2, reference=reference)
    assert score.number(gain, ours, WHOLE, other) == pytest.approx(100 * (0.6 / 0.4 - 1))
    with pytest.raises(Unscored, match="was not run"):
        score.number(gain, ours, WHOLE, None)
    with pytest.raises(Unscored, match=r"99.00 % not reached in 3 rounds, best 60.00 %"):
        score.number(Contract(metric="rounds-to-target", target=99.0), ours, WHOLE)


def test_a_reference_takes_all_its_rounds_to_its_own_last_accuracy():
    """Table 4 of the first paper: FedPer 100, pFedSD 20 (5×): "the same accuracy as running FedPer for 100 rounds"."""

    def ran(folder, rates):
        records = [
            {"round": t, "personal_clients": {"0": rate}, "samples": {"0": 5}} for t, rate in enumerate(rates, 1)
        ]
        return Result(folder, 0, history=records)

    fedper, pfedsd = ran("fedper", [0.6] * 50 + [0.5] * 50), ran("pfedsd", [0.1] * 19 + [0.55] * 81)
    rounds = Contract(metric="rounds-to-target", reference={"method": "fedper"})
    assert score.number(rounds, fedper, WHOLE, fedper) == 100  # though its accuracy was as high after the first
    assert score.number(rounds, pfedsd, WHOLE, fedper) == 20
    speed = Contract(metric="rounds-speedup", reference={"method": "fedper"})
    assert score.number(speed, pfedsd, WHOLE, fedper) == 5


def test_what_was_not_scored_is_named():
    with pytest.raises(Unscored, match="new"):
        score.number(Contract(model="new"), Result("x", 0, history=history()), WHOLE)
    assert score.number(Contract(model="new"), Result("x", 0, history=history(), after={"new": 0.4}), WHOLE) == 40.0


def test_curves_are_averaged_over_the_rounds_that_all_have():
    assert score.mean_curve([[(1, 1.0), (2, 3.0)], [(1, 3.0), (2, 5.0), (3, 9.0)]]) == [
        (1, 2.0, pytest.approx(2**0.5)), (2, 4.0, pytest.approx(2**0.5)),
    ]  # fmt: skip


# ---- what is kept ----------------------------------------------------------------------------------------------------------
def content(source):
    """Return the checksum of every source."""
    return "sha256:one"


def kept(tmp_path, experiment, scale=WHOLE):
    """A store with one result."""
    store = Store(tmp_path, content)
    folder = store.folder(store.name(experiment, scale))
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"round": 1}\n')
    run = SimpleNamespace(
        after={}, cost=SimpleNamespace(to_dict=dict), history=[{"round": 1, "seconds": 2.0}], engine="one"
    )
    store.write(experiment, scale, run, "abc", "fedstill reproduce x")
    return store, folder


def test_a_result_is_found_by_its_settings(tmp_path):
    experiment = Experiment(rounds=1, device="cpu")
    store, _ = kept(tmp_path, experiment)
    result = store.read(experiment, WHOLE)
    assert (result.seed, result.partition, result.seconds, len(result.history)) == (0, "abc", 2.0, 1)
    assert store.read(dataclasses.replace(experiment, data_root="/elsewhere", workers=2), WHOLE) is not None
    for other in ({"seed": 1}, {"rounds": 2}, {"lr": 0.02}, {"method": PFedSD(lam=0.3)}):
        assert store.read(dataclasses.replace(experiment, **other), WHOLE) is None
    assert store.read(experiment, Scale(0.5)) is None


def test_other_data_of_the_same_name_have_no_result(tmp_path):
    experiment = Experiment(rounds=1, device="cpu")
    kept(tmp_path, experiment)
    assert Store(tmp_path, content).read(experiment, WHOLE).data == {"digits": "sha256:one"}
    other = Store(tmp_path, lambda source: "sha256:two")
    assert other.read(experiment, WHOLE) is None
    absent = Store(
        tmp_path, lambda source: None
    )  # which data are meant is plain, as long as there are results of one only
    assert absent.read(experiment, WHOLE).data == {"digits": "sha256:one"}
    other.fail(experiment, WHOLE, "the loss is nan", "fedstill reproduce x")
    assert other.read(experiment, WHOLE).failed
    assert not Store(tmp_path, content).read(experiment, WHOLE).failed
    assert absent.read(experiment, WHOLE) is None
    scored = dataclasses.replace(experiment, external="usps")  # of which there are no external scores
    assert Store(tmp_path, content).read(scored, WHOLE) is None


def test_a_result_without_a_checksum_of_its_data_is_not_found(tmp_path):
    experiment = Experiment(rounds=1, device="cpu")
    store, folder = kept(tmp_path, experiment)
    record = files.unseal(folder / RESULT)
    for change in ({"format": 1}, {"data": None}, {"data": {}}):
        files.write(folder / RESULT, files.seal({**record, **change}))
        assert store.read(experiment, WHOLE) is None, change


def test_data_are_known_by_their_content_not_their_place(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40)
    for name, x_of in (("one", x), ("moved", x), ("other", x + 1)):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "usps.npz", train_x=x_of, train_y=y, test_x=x_of[:9], test_y=y[:9])
    shelf = Shelf()
    one, moved, other, absent = (
        shelf.checksum("usps", str(tmp_path / name)) for name in ("one", "moved", "other", "absent")
    )
    assert one == moved != other
    assert one is not None
    assert absent is None


@pytest.mark.parametrize("field", ["x", "y", "test_x", "test_y", "owner", "domain"])
def test_every_array_of_a_data_set_is_in_its_checksum(field):
    given = {
        "x": np.zeros((4, 2), np.float32), "y": np.array([0, 1, 0, 1]), "test_x": np.zeros((2, 2), np.float32),
        "test_y": np.array([0, 1]), "owner": np.array([0, 0, 1, 1]), "domain": np.array([0, 1, 0, 1]),
    }  # fmt: skip
    changed = given[field].copy()
    changed[0] = 1 - changed[0]
    assert Dataset("a", classes=2, **given).checksum() == Dataset("b", classes=2, **given).checksum()
    assert (
        Dataset("a", classes=2, **given).checksum() != Dataset("a", classes=2, **{**given, field: changed}).checksum()
    )


def test_what_is_half_written_is_no_result(tmp_path):
    experiment = Experiment(rounds=1, device="cpu")
    store, folder = kept(tmp_path, experiment)
    whole = (folder / RESULT).read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b'"abc"', b'"abd"'), b""):
        (folder / RESULT).write_bytes(damaged)
        assert store.read(experiment, WHOLE) is None
    (folder / RESULT).write_bytes(whole)
    assert store.read(experiment, WHOLE) is not None
    with (folder / "metrics.jsonl").open("a") as file:  # records that are not those of the result
        file.write('{"round": 2}\n')
    assert store.read(experiment, WHOLE) is None


def test_a_failure_is_kept_with_its_reason(tmp_path):
    experiment = Experiment(rounds=1, device="cpu")
    store = Store(tmp_path, content)
    store.fail(experiment, WHOLE, "the loss is nan", "fedstill reproduce x")
    assert store.read(experiment, WHOLE).failed == "the loss is nan"


def test_a_new_setting_with_its_default_changes_no_digest(monkeypatch, tmp_path):
    experiment = Experiment(rounds=7, device="cpu", method=PFedSD(lam=0.3))
    before = digest(experiment, WHOLE)
    more = {**values_of(experiment), "unheard_of": 0}
    monkeypatch.setattr(
        "fedstill.reproduce.store.values_of", lambda e: more if e is experiment else {**values_of(e), "unheard_of": 0}
    )
    assert digest(experiment, WHOLE) == before


# ---- what is shared ---------------------------------------------------------------------------------------------------------
def test_data_are_read_and_dealt_once():
    shelf = Shelf()
    one = Experiment(data="digits", clients=5, partition="iid")
    first = shelf.federation(one, WHOLE)
    assert shelf.federation(dataclasses.replace(one, rounds=9, lr=0.5, method=PFedSD()), WHOLE) is first
    assert shelf.made == 2  # the source and its division
    assert shelf.federation(dataclasses.replace(one, seed=1), WHOLE) is not first
    assert shelf.federation(one, Scale(0.5)) is not first
    assert shelf.made == 4


def test_memory_is_bounded_and_the_longest_unused_goes_first():
    shelf = Shelf(limit=1)
    one, other = (Experiment(data="digits", clients=n, partition="iid") for n in (4, 5))
    first = shelf.federation(one, WHOLE)
    shelf.federation(other, WHOLE)
    assert shelf.federation(one, WHOLE) is not first
    assert len(shelf._kept) == 1


def test_a_shelf_deals_as_a_run_does():
    from fedstill.run import prepare

    experiment = Experiment(data="digits", clients=6, partition="dirichlet:0.3", seed=4)
    assert Shelf().federation(experiment, WHOLE).hash == prepare.federation_of(experiment).hash


# ---- missing data --------------------------------------------------------------------------------------------------------------
def test_missing_data_says_which_files_to_put_where(tmp_path):
    trials = [t.experiment for t in plan(find(["fedbsd/fig3"])).trials]
    with pytest.raises(InputError) as caught:
        sources.check(trials, str(tmp_path))
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "domainnet" in message
    sources.check([Experiment(data="synthetic:0.5,0.5"), Experiment(data="digits")], str(tmp_path))


# ---- how it looks --------------------------------------------------------------------------------------------------------------
def readings(values=lambda cell: (cell.published, cell.published + 0.2), only="fmnist"):
    out = []
    for cell in chosen(only):
        own = values(cell)
        judged = verdict(Sample(cell.published, cell.spread, 3), Sample.of(own)) if own else None
        out.append(Reading(cell, len(own) or 3, values=own, verdict=judged))
    return out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_the_width_and_has_every_number(width):
    text = layout.text(TABLE2, readings(), WHOLE, width)
    assert all(len(line) <= width for line in text.splitlines())
    for cell in chosen("fmnist"):
        assert f"{cell.published:.2f} ± {cell.spread:.2f}" in text
    assert "holds" in text
    assert "SCALED" not in text


def test_scaled_numbers_say_so_wherever_a_verdict_stands():
    own = readings()
    own = [dataclasses.replace(one, verdict=verdict(Sample(0.0), one.ours, scaled=True)) for one in own]
    for text in (layout.text(TABLE2, own, Scale(0.1)), layout.markdown(TABLE2, own, Scale(0.1))):
        assert "SCALED to 0.1" in text
        assert "SCALED: differences from the whole, of which there are no verdicts" in " ".join(text.split())
        assert "ranking (SCALED) in" in text
        assert not re.search("noise \\d|better|worse", text)


def test_a_failed_cell_is_named_and_a_missing_one_too():
    own = readings(lambda cell: ())
    failed = dataclasses.replace(own[0], problem="seed 0: the loss is nan")
    text = layout.text(TABLE2, [failed, *own[1:]], WHOLE, 120)
    assert "seed 0: the loss is nan" in text
    assert "failed" in text
    assert "not run" in text
    assert f"{len(own) - 1} of {len(own)} cells have not been run" in text


def test_rankings_compare_methods_of_one_setting():
    ranked = rankings(TABLE2, readings())
    assert len(ranked) == 2  # a row of the paper each
    assert all(r.pairs == 21 and r.tau == 1 for r in ranked)
    turned = rankings(TABLE2, readings(lambda cell: (100 - cell.published,)))
    assert all(r.tau == -1 for r in turned)


def test_results_json_is_complete(tmp_path):
    planned = plan([TABLE2], "fmnist,20clients")
    own = readings(only="fmnist,20clients")
    made = write.write(tmp_path, TABLE2, own, planned, "fedstill reproduce pfedsd/table2")
    record = json.loads(made[0].read_text())
    assert record["command"] == "fedstill reproduce pfedsd/table2"
    cell = record["cells"][0]
    assert cell["values"] == [90.15, 90.15 + 0.2]
    assert cell["published"] == 90.15
    assert cell["settings"]["method"]["id"] == "fedavg"
    assert files.digest(made[0].read_bytes())
    assert "| FMNIST" in made[1].read_text()


def test_the_estimate_of_the_list_counts_local_steps():
    """20 steps of 20 samples, of 10 of 100 clients in 600 rounds, and a third of that time for a test sample."""
    (by_steps,) = [t.experiment for t in plan(find(["pfedkd-wcl/table1-steps"]), "synthetic-mlr,fedavg", 1).wanted]
    (by_epochs,) = [t.experiment for t in plan(find(["pfedkd-wcl/table1"]), "synthetic-mlr,fedavg", 1).wanted]
    clock = quick.Clock("")
    clock._step = lambda experiment, data: 1.0
    samples, tests = len(clock._shelf.dataset(by_steps.data, "")), 0.25 / 3
    assert clock._run(by_steps) == pytest.approx(600 * (10 * 20 * 20 + samples * tests))
    assert clock._run(by_epochs) == pytest.approx(600 * (samples * 0.75 * 0.1 * 20 + samples * tests))


class Shelved:
    """Stands for a store: the results by seed, "" for one that failed."""

    def __init__(self, rates):
        self.rates = rates

    def name(self, experiment, scale):
        return f"seed{experiment.seed}"

    def read(self, experiment, scale):
        seed = experiment.seed
        if seed >= len(self.rates) or self.rates[seed] is None:
            return None
        if self.rates[seed] == "":
            return Result(f"seed{seed}", seed, failed="the loss is nan")
        record = {"round": 1, "personal_clients": {"0": self.rates[seed]}, "samples": {"0": 5}, "participants": [0]}
        return Result(f"seed{seed}", seed, history=[record])


@pytest.mark.parametrize(
    ("rates", "state", "said"),
    [
        ([0.95, 0.96, 0.97], "done", "better"),
        ([0.95, 0.96, ""], "failed", "2 of 3 seeds"),  # what did not fail is no fair sample
        ([0.95, "", ""], "failed", "1 of 3 seeds"),
        ([0.95, None, ""], "failed", "1 of 3 seeds"),
        ([0.95, 0.96, None], "partial", "2 of 3 seeds"),
    ],
)
def test_only_a_cell_with_all_its_seeds_is_judged(rates, state, said):
    planned = plan([TABLE2], "fmnist-dirichlet-20,fedavg", 3)
    readings = read(planned, Shelved(rates), Shelf(), "", {})[TABLE2.name]
    (reading,) = [one for one in readings if one.cell.id == planned.chosen[0].cells[0].id]
    assert reading.state == state
    assert (reading.verdict is None) == (said != "better")
    assert said in layout.judged(reading)


@pytest.mark.parametrize("name", ["pfedsd/fig5", "pfedsd/fig7", "pfedsd/fig8", "pfedsd/fig6"])
def test_every_line_of_a_figures_csv_says_its_scale(name):
    cell = papers.exhibit(name).cells[0]
    kinds = {
        "pfedsd/fig5": {"counts": np.ones((2, 3), np.int64)},
        "pfedsd/fig7": {"distribution": (1.0, 2.0)},
        "pfedsd/fig6": {"curves": ([(1, 2.0), (2, 3.0)],)},
    }
    table = write.table_of([Reading(cell, 1, values=(1.0,), **kinds.get(name, {}))], Scale(0.1))
    head, *lines = list(csv.reader(table.splitlines()))
    assert lines
    assert all(dict(zip(head, line, strict=True))["scale"] == "0.1" for line in lines)
