"""The papers' tables and figures: every cell is an experiment of ours with a contract that it can fulfil."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fedstill import papers
from fedstill.core.errors import InputError
from fedstill.data import partition
from fedstill.data.split import parse_split
from fedstill.methods import METHODS
from fedstill.papers import METRICS, Cell, Contract, Exhibit
from fedstill.papers.parse import parsed
from fedstill.run.evaluate import Evaluation
from fedstill.run.experiment import Experiment

EXHIBITS = [exhibit for name in papers.names() for exhibit in papers.exhibits(name).values()]
CELLS = [cell for exhibit in EXHIBITS for cell in exhibit.cells]
ORDER = {
    "pfedsd": "fig2 fig5 table2 table2-local table3 fig6 table4 table5 fig7 table6 table7 table8 fig8 table9 table10 table11",
    "fedbsd": "table1 table1-start-local fig3 fig4",
    "pfedkd-wcl": "fig1 fig2 fig3 fig4 fig5 fig6 table1 table1-steps table1-2digits table1-2digits-steps section3.4",
    "cd2-pfed": "fig5 table1 table1-warm table2 table3 table4 fig6 table5",
    "spectral": "table1 table2 table3 table4 table4-fixed table5 fig3 table6 table7 table8 table9 table10",
}
FORMS = {"table", "curves", "lines", "heat-map", "bars", "bubbles", "distribution"}


def made(values: dict) -> Experiment:
    """The experiment, with what is only checked when it is prepared."""
    experiment = Experiment.from_values(values)
    partition.parse(experiment.partition)
    parse_split(experiment.split)
    return experiment


named = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)


@pytest.mark.parametrize("name", papers.names())
def test_all_tables_and_figures_are_there_in_the_papers_order(name: str) -> None:
    assert " ".join(papers.exhibits(name)) == ORDER[name]


def test_all_methods_of_a_paper_are_in_its_tables() -> None:
    for name in papers.names():
        used = {cell.method for exhibit in papers.exhibits(name).values() for cell in exhibit.cells}
        assert used == {name, *papers.load(name)["baselines"]}


def test_all_settings_of_a_paper_are_in_its_tables() -> None:
    for name in papers.names():
        used = {cell.setting for exhibit in papers.exhibits(name).values() for cell in exhibit.cells}
        assert used == set(papers.load(name)["settings"])


@named
def test_every_cell_is_an_experiment(exhibit: Exhibit) -> None:
    for cell in exhibit.cells:
        assert made(cell.experiment()).method.id == cell.method
        if (reference := cell.reference()) is not None:
            made(reference)


@named
def test_a_cell_has_its_place(exhibit: Exhibit) -> None:
    ids = [cell.id for cell in exhibit.cells]
    assert len(set(ids)) == len(ids) > 0
    assert exhibit.form in FORMS
    assert (exhibit.form == "table") == (exhibit.kind == "table")
    assert exhibit.seeds >= 1
    assert exhibit.title
    assert exhibit.where.replace("Fig. ", "fig").replace("Table ", "table").split(",")[0] in (
        exhibit.id.split("-")[0],
        "§3.4",
    )
    assert len({panel.id for panel in exhibit.panels}) == len(exhibit.panels)
    for panel in exhibit.panels:
        here = [cell for cell in exhibit.cells if cell.panel == panel.id]
        assert {cell.row for cell in here} == set(panel.rows)
        assert {cell.column for cell in here} == set(panel.columns)
        assert len(here) <= len(panel.rows) * len(panel.columns)
        assert (exhibit.kind == "figure") == bool(panel.x and panel.y)
    places = [(cell.panel, cell.row, cell.column) for cell in exhibit.cells]
    assert len(set(places)) == len(places)
    assert "seeds" in exhibit.unstated or exhibit.paper in ("pfedsd", "spectral")
    assert bool(exhibit.spread) == any(cell.spread is not None for cell in exhibit.cells) or exhibit.id == "fig6"


@named
def test_a_cells_run_gives_what_its_contract_asks(exhibit: Exhibit) -> None:
    for cell in exhibit.cells:
        contract, values, cls = cell.contract, cell.experiment(), METHODS[cell.method]
        if contract.model == "new":
            assert values["new"]
        if contract.model == "external":
            assert values["external"]
        if contract.model == "fine-tuned":
            assert values["fine_tune"] > 0
        if contract.model == "newcomers":
            assert values["newcomers"] > 0
            assert values["join_epochs"] > 0
        if contract.model == "averaged":
            assert values["averaged"]
            assert not ("generic" in cls.scores and cls.trains_generic)
        if contract.model == "generic":
            assert "generic" in cls.scores
        if contract.clients == "common":
            assert values["split"] == "official" or values.get("pool") == "train"
        if isinstance(contract.clients, int):
            assert contract.clients < values["clients"]
        if isinstance(contract.round, int):
            assert contract.round <= values["rounds"]
        if contract.metric == "forgetting":
            assert values["forgetting"]
        if contract.metric == "time-speedup":
            assert values["profile"]
        if contract.round == "best-val":
            assert len(parse_split(values["split"])) == 3
        assert cell.published is None or not contract.curve
        assert contract.unit == METRICS[contract.metric].unit


def test_contracts_have_the_words_of_an_evaluation() -> None:
    """Where a contract is an `Evaluation`, the same words make one."""
    made = 0
    for contract in (cell.contract for cell in CELLS):
        plain = contract.metric == "accuracy" and contract.model in ("personal", "generic")
        if plain and isinstance(contract.clients, str) and isinstance(contract.round, str):
            Evaluation(model=contract.model, clients=contract.clients, mean=contract.mean, round=contract.round)
            made += 1
    assert made > 400


def test_published_numbers_are_plausible() -> None:
    for cell in CELLS:
        if cell.published is None:
            assert cell.spread is None
            continue
        if cell.contract.metric == "accuracy":
            assert 10 < cell.published < 100, cell.id
            assert cell.spread is None or 0 < cell.spread < 4
        assert cell.published > 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"metric": "acuracy"}, "accuracy"),
        ({"model": "global"}, "one of"),
        ({"clients": -1}, "client from 0"),
        ({"round": 0}, "round from 1"),
        ({"round": "first"}, "last"),
        ({"clients": "common"}, "at home"),
        ({"metric": "time-share"}, "communication"),
        ({"metric": "improvement"}, "compares with"),
        ({"metric": "rounds-to-target"}, "reference whose accuracy"),
    ],
)
def test_an_illegal_contract_is_refused(wrong: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Contract(**wrong)


@pytest.mark.parametrize(
    ("name", "says"),
    [("pfedsd/tabel2", "table2"), ("pfedds/table2", "pfedsd"), ("pfedsd", "pfedsd/fig2"), ("pfeds", "pfedsd")],
)
def test_an_unknown_exhibit_names_the_nearest(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        papers.exhibit(name)


SMALL = {
    "title": "T",
    "where": "Table 9",
    "columns": [
        {"label": "a", "setting": "mnist-mlr"},
        {"label": "b", "setting": "mnist-mlp", "contract": {"round": 7}},
    ],
    "rows": [
        {"label": "FedAvg", "method": "fedavg", "values": [[90.0, 1.5], "> 98"]},
        {"label": "Ours", "variant": {"rounds": 3, "method": {"alpha": 0.5}}, "values": ["-", "?"]},
        {"label": "Far", "on": {"mnist-mlr": {"variant": {"method": {"tau": 2.0}}}}},
    ],
    "variant": {"rounds": 9, "method": {"tau": 3.0}},
}
SHARED = {"seeds": 3, "spread": "seeds", "unstated": ["mean"], "contract": {"mean": "sample"}}


def test_a_cell_is_what_exhibit_row_and_column_say_together() -> None:
    exhibit = parsed("pfedkd-wcl", {"table9": SMALL}, SHARED)["table9"]
    assert [cell.id for cell in exhibit.cells] == [
        "mnist-mlr/fedavg",
        "mnist-mlp/fedavg",
        "mnist-mlp/ours",
        "mnist-mlr/far",
        "mnist-mlp/far",
    ]
    first, second, third, fourth, fifth = exhibit.cells
    assert (first.published, first.spread, first.relation) == (90.0, 1.5, "=")
    assert (second.published, second.spread, second.relation) == (98.0, None, ">")
    assert (third.published, third.method, third.label) == (None, "pfedkd-wcl", "Ours")
    assert third.variant == {"rounds": 3, "method": {"tau": 3.0, "alpha": 0.5}}
    assert (fourth.variant["method"], fifth.variant["method"]) == ({"tau": 2.0}, {"tau": 3.0})
    assert first.contract == Contract(mean="sample")
    assert second.contract == Contract(mean="sample", round=7)
    assert third.experiment()["rounds"] == 3
    assert third.experiment()["method"] == {"id": "pfedkd-wcl", "alpha": 0.5, "tau": 3.0}
    assert (exhibit.seeds, exhibit.kind, exhibit.unstated) == (3, "table", ("mean",))


def test_an_exhibit_like_another_says_what_differs() -> None:
    other = {"like": "table9", "title": "U", "only": {"setting": "*-mlp"}, "variant": {"rounds": 5}}
    exhibit = parsed("pfedkd-wcl", {"table9": SMALL, "table9-x": other}, SHARED)["table9-x"]
    assert (exhibit.title, exhibit.where, exhibit.columns) == ("U", "Table 9", ("b",))
    assert exhibit.like == "table9"
    assert [cell.variant["rounds"] for cell in exhibit.cells] == [5, 3, 5]
    assert exhibit.cells[0].variant["method"] == {"tau": 3.0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": [{"label": "r", "values": [1.0]}]}, "2 values"),
        ({"rows": [{"label": "r", "value": [1.0, 2.0]}]}, "values"),
        ({"colums": []}, "columns"),
        ({"rows": [{"label": "r", "values": ["~ 3", "?"]}]}, "number with one of"),
        ({"like": "table8"}, "table9"),
    ],
)
def test_a_broken_file_is_refused(change: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parsed("pfedkd-wcl", {"table9": {**SMALL, **change}}, SHARED)


def test_a_reference_is_the_other_method_or_the_same_with_other_fields() -> None:
    table4 = {cell.id: cell for cell in papers.exhibits("pfedsd")["table4"].cells}
    reference = table4["cifar100-dirichlet-100/pfedsd"].reference()
    assert reference == papers.values("pfedsd", "cifar100-dirichlet-100", "fedper")
    table9 = papers.exhibits("spectral")["table9"].cells
    vanilla = [Experiment.from_values(cell.experiment()) for cell in table9 if cell.row == "Vanilla Ditto"]
    for row in papers.exhibits("spectral")["table9"].rows:
        references = [Experiment.from_values(cell.reference()) for cell in table9 if cell.row == row]
        assert references == vanilla
    for cell in papers.exhibits("spectral")["table4"].cells:
        assert cell.reference() == {**cell.experiment(), "wait_free": "off"}


def number(name: str, **where: str) -> float:
    """The one published number at a place."""
    (cell,) = (c for c in papers.exhibit(name).cells if all(getattr(c, key) == value for key, value in where.items()))
    assert cell.published is not None
    return cell.published


def test_the_papers_own_arithmetic() -> None:
    """What the papers derive from other numbers of theirs comes out, as far as their rounding."""
    for cell in papers.exhibit("pfedsd/table4").cells:
        if cell.contract.metric == "rounds-speedup":
            rounds = number("pfedsd/table4", row=cell.row, column=cell.column.removesuffix(", speedup"))
            assert cell.published == pytest.approx(100 / rounds, abs=0.051)
    table10 = papers.exhibit("pfedsd/table10")
    for row in table10.rows:
        shares = [cell.published for cell in table10.cells if cell.row == row and cell.contract.part]
        assert sum(shares) == pytest.approx(100, abs=0.015)
    flops = papers.exhibit("pfedsd/table11")
    assert number(flops.name, id="pfedsd-model/flops") / number(flops.name, id="fedavg/flops") == pytest.approx(
        1.067, abs=5e-4
    )
    assert number("pfedsd/table9", id="cifar100-r60/kl") == number("pfedsd/table6", id="cifar100-r60/pfedsd")


def test_percentages_of_the_third_paper_that_its_table_does_not_give() -> None:
    """Those that the note of the exhibit names, and no others."""
    differing = set()
    for cell in papers.exhibit("pfedkd-wcl/section3.4").cells:
        panel = cell.setting.split("-")[1]
        ours = number("pfedkd-wcl/table1", panel=panel, setting=cell.setting, method="pfedkd-wcl")
        other = number("pfedkd-wcl/table1", panel=panel, setting=cell.setting, method=cell.contract.reference["method"])
        if round(100 * (ours / other - 1), 1) != cell.published:
            differing.add(cell.id)
    assert differing == {
        "mnist-mlr/fedavg",
        "synthetic-mlr/fedavg",
        "synthetic-mlr/fedprox",
        "synthetic-mlr/per-fedavg",
        "synthetic-mlp/per-fedavg",
        "synthetic-mlp/pfedme",
    }


def test_results_that_the_papers_print_twice_are_the_same() -> None:
    """The same experiment and contract in several tables of a paper: published once or the same."""
    known: dict[str, list[Cell]] = {}
    for cell in CELLS:
        if cell.published is not None and cell.contract.metric == "accuracy":
            key = repr((cell.paper, Experiment.from_values(cell.experiment()), cell.contract))
            known.setdefault(key, []).append(cell)
    several = [cells for cells in known.values() if len(cells) > 1]
    assert len(several) > 30
    for cells in several:
        tables = {cell.exhibit for cell in cells}
        if tables & {"table5"} and cells[0].paper == "pfedsd":
            continue  # means over clients, perhaps of one seed: near Table 2's, not the same
        for one, other in pairwise(cells):
            assert one.published == other.published, (one.exhibit, one.id, other.exhibit, other.id)
