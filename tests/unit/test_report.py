"""Tables, summaries and pictures of results, by numbers worked out on paper."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import fedstill as fs
from fedstill.methods import METHODS
from fedstill.report import bubbles, figures, text
from fedstill.report.summary import is_summary
from fedstill.report.summary import summary as summarise
from fedstill.run.simulation import Run
from fedstill.server.records import Scores, summary
from tests.problems import Plain, ragged

FACTS = text.Facts("digits", 3, "iid", ("0123456789abcdef",), "mlp")


def made(method: fs.Method, hits: list[int], seed: int = 0, **training) -> Run:
    """A run whose last scored round has these right answers of 10, 10 and 80."""
    models = {"personal": hits, **{name: hits for name in method.scores}}
    history = [
        {
            "round": 1,
            "participants": [0],
            "loss": 1.0,
            "seconds": 1.5,
            **summary(Scores([0, 1, 2], [10, 10, 80], models)),
        },
        {"round": 2, "participants": [0], "loss": 1.0, "seconds": 2.0},
        {
            "round": 3,
            "participants": [0],
            "loss": 1.0,
            "seconds": 0.5,
            **summary(Scores([0, 1, 2], [10, 10, 80], models)),
        },
    ]
    settings = fs.Training(rounds=3, seed=seed, **training)
    return Run(None, None, None, method, settings, "one", history, 0.0, None)  # type: ignore[arg-type]


def test_one_run() -> None:
    lines = text.table([made(fs.PFedSD(), [9, 5, 8])], FACTS).splitlines()
    assert " ".join(lines[0].split()) == ("method personal % worst 10 % per sample % generic % seconds")
    # mean of 0.9, 0.5, 0.1; their spread √(0.32/3); the worst client; 22 of 100 samples; 1.5 + 2 + 0.5 seconds
    assert lines[2].split() == ["pfedsd", "50.00", "±", "32.66", "10.00", "22.00", "22.00", "4.0"]
    assert "personal model, all clients, mean per client, last round; ± standard deviation over clients" in lines[4]
    assert "data digits, 3 clients, partition iid, model mlp; partition hash 0123456789ab" in lines
    assert lines[-1].startswith("3 rounds, participation 1, 5 local epochs, batch 16, lr 0.05")


def test_columns_are_aligned() -> None:
    lines = text.table([made(fs.PFedSD(), [10, 10, 80]), made(fs.Local(), [1, 0, 8])]).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[2].index("±") == lines[3].index("±")


def test_the_best_is_first_and_marked_and_what_is_missing_is_a_dash() -> None:
    table = text.table([made(fs.Local(), [9, 5, 8]), made(fs.FedAvg(), [10, 10, 80])])
    lines = table.splitlines()
    assert lines[2].startswith("fedavg *")
    assert lines[3].split()[0] == "local"
    assert lines[3].split()[-2:] == [text.NONE, "4.0"]
    assert "fedavg: no personal model, so the generic one serves every client" in table


def test_seeds_of_one_method_are_one_row() -> None:
    runs = [made(fs.FedRep(), [5, 5, 40], seed=0), made(fs.FedRep(), [7, 7, 56], seed=1)]
    table = text.table(runs)
    # 50 and 70 per cent: mean 60, sample deviation √(2·10²/1)
    row = table.splitlines()[2].split()
    assert row[:4] == ["fedrep", "60.00", "±", "14.14"]
    assert row[-1] == "2"
    assert "over seeds (n − 1)" in table


def test_a_method_of_which_one_seed_is_left_has_no_spread_beside_those_of_several() -> None:
    runs = [made(fs.FedRep(), [5, 5, 40], seed=0), made(fs.FedRep(), [7, 7, 56], seed=1), made(fs.Local(), [9, 5, 8])]
    rows = {line.split()[0]: line.split() for line in text.table(runs).splitlines()[2:4]}
    assert rows["fedrep"][2:5] == ["60.00", "±", "14.14"]  # the best: marked
    assert rows["local"][1:3] == ["50.00", "10.00"]


def test_what_differs_is_said_below() -> None:
    runs = [made(fs.Local(), [1, 1, 1], lr=0.1, batch_size=1234567), made(fs.Local(), [1, 1, 1], lr=1e-5, batch_size=8)]
    assert "batch 1234567 or 8, lr 0.1 or 1e-05" in text.table(runs)


def test_rows_that_differ_in_a_setting_say_which() -> None:
    runs = [made(fs.PFedSD(lam=0.5), [9, 5, 8]), made(fs.PFedSD(lam=1.0), [9, 5, 8]), made(fs.Local(), [1, 1, 1])]
    assert set(text.grouped(runs)) == {"pfedsd lam=0.5", "pfedsd lam=1.0", "local"}
    runs = [made(fs.Local(), [1, 1, 1], lr=0.1), made(fs.Local(), [1, 1, 1], lr=0.2, seed=3)]
    assert set(text.grouped(runs)) == {"local lr=0.1", "local lr=0.2"}


def test_a_run_s_own_table() -> None:
    run = fs.simulate(fs.PFedSD(), model=Plain(), data=ragged(), rounds=2, epochs=1, eval_every=2)
    assert f"{100 * run.score():.2f}" in run.table()


def test_the_summary_holds_every_run_and_the_means() -> None:
    experiments = {"local": fs.Experiment(method=fs.Local()), "fedavg": fs.Experiment(method=fs.FedAvg())}
    runs = {
        "local": [
            ("local/seed-0", made(fs.Local(), [5, 5, 40])),
            ("local/seed-1", made(fs.Local(), [7, 7, 56], seed=1)),
        ]
    }
    content = json.loads(json.dumps(summarise(experiments, runs, FACTS, {"fedavg": "seed 0: nan"})))
    assert is_summary(content)
    assert content["finished"] is False
    assert content["failed"] == {"fedavg": "seed 0: nan"}
    local = content["methods"]["local"]
    assert [(run["seed"], run["folder"], run["personal"]) for run in local["runs"]] == [
        (0, "local/seed-0", pytest.approx(0.5)),
        (1, "local/seed-1", pytest.approx(0.7)),
    ]
    assert local["personal"]["mean"] == pytest.approx(0.6)
    assert local["personal"]["std"] == pytest.approx(np.sqrt(0.02))
    assert local["generic"] is None


@pytest.mark.parametrize("other", [None, [], {}, {"format": 1}, {"methods": {}, "fedstill": "0"}, "text"])
def test_what_is_not_our_summary(other: object) -> None:
    assert not is_summary(other)


def test_bubbles_in_a_terminal() -> None:
    lines = bubbles.bubbles(np.array([[16, 9, 4, 1, 0], [0, 0, 0, 0, 16]]))
    assert lines[1].split() == ["client", "0", "⬤", "●", "•", "·", "30"]
    assert lines[2].split() == ["client", "1", "⬤", "16"]
    assert lines[3] == "samples of a class: · up to 1   • up to 4   ● up to 9   ⬤ up to 16"
    assert "16 at least, 23.0 on average, 30 at most" in bubbles.sizes(np.array([[16, 9, 4, 1, 0], [0, 0, 0, 0, 16]]))


def test_bubbles_have_the_names_of_clients_and_classes() -> None:
    counts = np.array([[4, 1], [0, 4]])
    lines = bubbles.bubbles(
        counts, width=60, names=("berlin", "a site whose name is much too long"), labels=("healthy", "sick")
    )
    assert lines[0].split() == ["class", "0", "1", "samples"]
    assert lines[1].split() == ["berlin", "⬤", "•", "5"]
    assert lines[2].startswith("a site whose name i… ")
    assert "classes: 0 healthy, 1 sick" in lines
    assert len({len(line) for line in lines[:3]}) == 1, "columns are aligned"


def test_many_clients_and_classes_are_cut_to_the_terminal() -> None:
    lines = bubbles.bubbles(np.ones((300, 100), int), width=80)
    assert all(len(line) <= 80 for line in lines)
    # 80 columns less 'client NNN ' and '  samples' leave room for 29 classes of two columns
    assert lines[-2] == "… 260 more clients and 71 more classes"


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("methods", [(fs.PFedSD,), (fs.Local, fs.FedAvg, fs.FedRep)], ids=["one", "three"])
def test_the_picture_is_written(tmp_path, methods, seeds) -> None:
    path = tmp_path / "new" / "figure.png"
    runs = {cls.id: [made(cls(), [5, 5, 40 + s], seed=s) for s in range(seeds)] for cls in methods}
    figures.compare_figure(runs, path, FACTS)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in path.parent.iterdir()] == ["figure.png"]


@pytest.mark.parametrize("shape", [(1, 1), (20, 10), (150, 100)])
def test_the_bubble_chart_is_written(tmp_path, shape) -> None:
    figures.bubbles(np.arange(shape[0] * shape[1]).reshape(shape) + 1, tmp_path / "b.png", "title", "note")
    figures.bubbles(np.ones(shape), tmp_path / "b.png", names=["site"] * shape[0], labels=["class"] * shape[1])
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_leave_no_global_state(tmp_path) -> None:
    figures.compare_figure({"local": [made(fs.Local(), [5, 5, 40])]}, tmp_path / "a.svg")
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []


def drawn(monkeypatch, tmp_path: Path, runs: dict, **more):
    """The picture's axes of curves: lines by colour, names, limits."""
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure))
    figures.compare_figure(runs, tmp_path / "x.png", **more)
    return kept[0].axes[0], kept[0]


def with_history(method: str, values: list[float], **more) -> fs.Run:
    """A finished run whose accuracies are these; all else is of a real one."""
    done = made(METHODS[method](), [8, 8, 64])
    history = [{**done.history[-1], "round": t, "personal": value, **more} for t, value in enumerate(values, 1)]
    return dataclasses.replace(done, history=history)


def test_a_picture_of_many_methods_colours_the_best_the_baselines_and_those_asked_for(tmp_path, monkeypatch) -> None:
    one = with_history("fedavg", [0.1, 0.9, 0.92, 0.94, 0.95])
    runs = {}
    for i, name in enumerate(METHODS):
        shifted = [{**record, "personal": record["personal"] - 0.001 * i} for record in one.history]
        runs[name] = [dataclasses.replace(one, method=METHODS[name](), history=shifted)]
    best = list(METHODS)[:4]
    axes, figure = drawn(monkeypatch, tmp_path, runs, asked=["spectral"])
    named = {text.get_text() for text in axes.texts}
    assert named == {*best, "spectral", "local", "fedavg"}
    assert sum(line.get_color() == figures.GREY for line in axes.get_lines()) == len(METHODS) - len(named)
    assert len({line.get_color() for line in axes.get_lines()} - {figures.GREY}) == len(named), "no colour twice"
    # From round 3 on the lowest in colour is spectral, the last of 28, with 92 − 2.7 = 89.3; 6 % of 95 − 89.3 below that is 89.0:
    # all six first rounds lie lower, and the second rounds of spectral and local, with 90 − 2.7 and 90 − 2.1.
    low, _ = axes.get_ylim()
    assert low == pytest.approx(89.3 - 0.06 * 5.7)
    assert "8 points of early rounds below the axis" in figure.get_supxlabel()
    heights = sorted(text.xyann[1] for text in axes.texts)
    inches = figure.get_size_inches()[1] * 0.68  # of the axis, about; a line of text of 9.5 points takes 0.13
    assert all((b - a) * inches > 0.15 for a, b in itertools.pairwise(heights)), "names do not overlap"


def test_the_pictures_generic_line_is_the_tables_number(tmp_path, monkeypatch) -> None:
    run = with_history("pfedsd", [0.5, 0.6], generic=0.41, generic_client=0.77)
    axes, _ = drawn(monkeypatch, tmp_path, {"pfedsd": [run]})
    assert [float(line.get_ydata()[-1]) for line in axes.get_lines()] == pytest.approx([60, 41])
    assert text.rows([run])[0].generic.value == pytest.approx(0.41)
    assert axes.texts[1].get_text() == "generic model, per sample"
