"""A finished run from its folder: the same history, table, scores and models, without training and without the data."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill import methods
from fedstill.core.errors import InputError
from fedstill.data.outline import Outline
from fedstill.run import load as loading
from fedstill.run import prepare

from ..problems import needed

TINY = {"rounds": 2, "clients": 4, "epochs": 1, "batch_size": 64, "workers": 1, "model": "mlp", "device": "cpu"}
NEED_DATA = ("fedfomo", "per-fedavg")  # whose personal models are made from the client's training data


def experiment(name: str = "pfedsd", **values) -> fs.Experiment:
    method = methods.get(name)()
    return fs.Experiment(method=method, **{**TINY, **needed(method), **values})


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_models(one: fs.Run, other: fs.Run) -> bool:
    clients = [*one.clients, *one.newcomers]
    return equal(one.generic(), other.generic()) and all(equal(one.personal(k), other.personal(k)) for k in clients)


def no_data(*args) -> None:
    raise AssertionError("the data were read")


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_s_models_come_back(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """To the bit; half of the clients take part in a round, so that some never did."""
    run = fs.run(experiment(name, participation=0.5), out=tmp_path / "run")
    if name not in NEED_DATA:
        monkeypatch.setattr(loading, "federation_of", no_data)
    again = fs.load(tmp_path / "run")
    assert again.history == run.history
    assert again.training == run.training
    assert again.method == run.method
    assert same_models(run, again)
    assert again.has_data == (name in NEED_DATA)
    said = capsys.readouterr().err
    assert ("this needs the clients' samples: reading digits" in said) == (name in NEED_DATA)


@pytest.mark.parametrize(
    "values",
    [
        {"newcomers": 1},
        {"attack": "label-flip", "attackers": 0.25, "average": "median"},
        {"average": "fltrust", "root_samples": 20},
        {"profile": "lognormal:0.5", "drop": 0.2, "deadline": 2.0},
        {"profile": "lognormal:0.5", "mode": "fedbuff"},
        {"profile": "lognormal:0.5", "wait_free": "until-download"},
        {"server": "adam"},
        {"dtype": "float64"},
        {"fine_tune": 1, "further_every": 1, "forgetting": True},
        {"split": "70/10/20", "score_round": "best-val"},
    ],
    ids=lambda values: next(iter(values.values())),
)
def test_whatever_the_settings(values: dict, tmp_path: Path) -> None:
    name = "ditto" if "wait_free" in values else "fedavg" if "average" in values or "server" in values else "pfedsd"
    run = fs.run(experiment(name, **values), out=tmp_path / "run")
    again, full = fs.load(tmp_path / "run"), fs.load(tmp_path / "run", data=True)
    for other in (again, full):
        assert same_models(run, other)
        assert (other.history, other.after, other.training) == (run.history, run.after, run.training)
        assert (other.clients, other.newcomers, other.attackers) == (run.clients, run.newcomers, run.attackers)
    assert not again.has_data
    assert full.new() == run.new()
    assert full.table() == run.table()


def test_scores_that_need_the_data_read_them(tmp_path: Path, capsys) -> None:
    run = fs.run(experiment(), out=tmp_path / "run")
    again = fs.load(tmp_path / "run")
    assert again.score(mean="sample") == run.score(mean="sample")
    assert not capsys.readouterr().err
    assert again.fine_tuned(1) == run.fine_tuned(1)
    assert "reading digits" in capsys.readouterr().err
    assert again.has_data
    assert same_models(run, again)


def test_other_data_are_refused(tmp_path: Path) -> None:
    fs.run(experiment(), out=tmp_path / "run")
    other = prepare.federation_of(experiment(seed=1))
    with pytest.raises(InputError, match=r"partition contents.*the data are others"):
        fs.load(tmp_path / "run", data=other).new()


def test_a_run_made_in_python(tmp_path: Path) -> None:
    torch.manual_seed(0)
    arrays = [
        (torch.randn(20, 3), torch.randint(2, (20,)), torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(3)
    ]
    fed, net = fs.Federation.from_arrays(arrays), torch.nn.Linear(3, 2)
    settings = {"rounds": 2, "epochs": 1, "batch_size": 8, "device": "cpu"}
    run = fs.simulate(fs.PerFedAvg(), model=net, data=fed, out=tmp_path / "run", **settings)
    with pytest.raises(InputError, match=r"code of its own \(\(python\)\).*model=MODULE"):
        fs.load(tmp_path / "run")
    again = fs.load(tmp_path / "run", model=torch.nn.Linear(3, 2))  # its weights are the checkpoint's
    assert equal(again.generic(), run.generic())
    with pytest.raises(InputError, match="data=FEDERATION"):
        again.personal(0)
    assert same_models(run, fs.load(tmp_path / "run", model=torch.nn.Linear(3, 2), data=fed))


def test_a_folder_of_several(tmp_path: Path) -> None:
    for label in ("fedavg", "local"):
        for seed in (0, 1):
            fs.run(experiment(label, seed=seed), out=tmp_path / "all" / label / f"seed-{seed}")
    runs = fs.load(tmp_path / "all")
    assert list(runs) == ["fedavg", "local"]
    assert [[run.training.seed for run in each] for each in runs.values()] == [[0, 1], [0, 1]]
    assert {run.method.id for run in runs["local"]} == {"local"}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds experiment.toml"):
        fs.load(tmp_path)
    fs.run(experiment(), out=tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    run = fs.load(tmp_path / "run")
    assert len(run.history) == 2  # records need no checkpoint
    with pytest.raises(InputError, match="with a whole checkpoint"):
        run.generic()
    text = tmp_path / "run" / "experiment.toml"
    text.write_text(text.read_text().replace("lr = 0.05", "lr = 0.5"))
    with pytest.raises(InputError, match="has been changed"):
        fs.load(tmp_path / "run")


def test_without_the_outline_the_data_are_read(tmp_path: Path) -> None:
    """As in folders of versions that wrote none."""
    run = fs.run(experiment(), out=tmp_path / "run")
    (tmp_path / "run" / "data.json").unlink()
    assert same_models(run, fs.load(tmp_path / "run"))


# ---- names, tables, frames -------------------------------------------------------------------------------------------
def cities(folder: Path) -> Path:
    """Three sites' files."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in ("berlin", "paris", "rome"):
        x = torch.randn(30, 3, generator=generator)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["a", "b", "c", "label"])
            writer.writerows([*row, int(row[0] > 0)] for row in x.tolist())
    return folder


def test_clients_keep_their_names(tmp_path: Path) -> None:
    data = cities(tmp_path / "cities")
    run = fs.run(experiment(data=str(data), clients=0), out=tmp_path / "run")
    assert run.outline is not None
    assert run.outline.names == ("berlin", "paris", "rome")
    again = fs.load(tmp_path / "run")
    assert again.outline == run.outline
    assert equal(again.personal("paris"), run.personal(1))
    with pytest.raises(InputError, match=r"a number from 0 to 2, or a name.*berlin"):
        again.personal("berlim")
    frame = again.to_frame(clients=True)
    assert list(frame["name"][:3]) == ["berlin", "paris", "rome"]
    assert frame["personal"].iloc[-1] == run.history[-1]["personal_clients"]["2"]


def test_an_outline_survives(tmp_path: Path) -> None:
    outline = Outline.of(prepare.federation_of(experiment(split="70/10/20")))
    assert Outline.from_dict(json.loads(json.dumps(outline.to_dict()))) == outline
    federation = outline.federation({"hash": "abc"})
    assert federation.sizes("val") == tuple(sizes["val"] for sizes in outline.sizes)
    assert (federation.shape, federation.classes) == (outline.shape, outline.classes)
    assert not any(len(client.y_train) for client in federation.clients)


def test_the_records_as_csv_and_as_a_frame(tmp_path: Path) -> None:
    run = fs.run(experiment(eval_every=2), out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert [row["personal"] for row in rows] == ["", repr(run.history[-1]["personal"])]  # scored in the last round only
    assert [row["participants"] for row in rows] == ["4", "4"]
    frame = run.to_frame()
    assert list(frame["loss"]) == [record["loss"] for record in run.history]


def test_short_words_for_runs_and_federations(tmp_path: Path) -> None:
    federation = prepare.federation_of(experiment())
    run = fs.run(experiment(), federation=federation)
    for value in (run, federation):
        assert len(repr(value)) < 300
        assert "\n" not in repr(value)
    assert repr(federation).startswith("Federation('digits': 4 clients, 10 classes, samples of 1×8×8")
    assert f"{100 * run.score():.2f} %" in repr(run)
    assert "<table>" in federation._repr_html_()
    assert "personal %" in run._repr_html_()
