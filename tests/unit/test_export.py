"""Models taken away: each file, read by its own library alone, answers as the run's model does; predictions and tracking."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedstill as fs
from fedstill.core.errors import InputError, TrainingError
from fedstill.run import export as exporting
from fedstill.run import track
from fedstill.run.export import export, export_all
from fedstill.run.predict import predict

from .test_load import cities

SETTINGS = {"rounds": 2, "epochs": 1, "batch_size": 32, "device": "cpu", "workers": 1}


class Small(nn.Module):
    """A convolution with BatchNorm, whose running statistics an export must have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2 * 6 * 6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


@pytest.fixture(scope="module")
def run() -> fs.Run:
    generator = torch.Generator().manual_seed(0)
    arrays = [
        tuple(
            part
            for n in (24, 8)
            for part in (torch.randn(n, 1, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator))
        )
        for _ in range(3)
    ]
    return fs.simulate(fs.PFedSD(), model=Small, data=fs.Federation.from_arrays(arrays, classes=4), **SETTINGS)


def expected(run: fs.Run, client: int | None, x: torch.Tensor) -> torch.Tensor:
    """By plain torch, from the state dict."""
    module = Small()
    module.load_state_dict(run.generic() if client is None else run.personal(client))
    with torch.no_grad():
        return module.eval()(x)


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("client", [1, None])
def test_safetensors(run: fs.Run, client: int | None, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    done = export(run, file, client)
    assert done.real
    assert done.difference < 1e-5
    module = Small()
    module.load_state_dict(load_file(file))
    with torch.no_grad():
        assert torch.equal(module.eval()(X), expected(run, client, X))
    with safe_open(str(file), "pt") as opened:
        meta = opened.metadata()
    assert meta["method"] == "pfedsd"
    assert meta.get("client") == (None if client is None else "1")
    assert json.loads(meta["classes"]) == ["0", "1", "2", "3"]
    assert json.loads(meta["shape"]) == [1, 8, 8]
    assert meta["contract"] == "personal model, all clients, mean per client, last round"
    assert [*tmp_path.iterdir()] == [file]


def test_onnx(run: fs.Run, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    export(run, tmp_path / "model.onnx", 2)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for x in (X, X[:1]):  # any number of samples
        (answers,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(answers, expected(run, 2, x).numpy(), atol=1e-5)
    meta = {entry.key: entry.value for entry in onnx.load(str(tmp_path / "model.onnx")).metadata_props}
    assert (meta["client"], meta["kind"]) == ("2", "personal")


def test_pt2(run: fs.Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model.pt2")
    extra = {exporting.ABOUT: ""}
    program = torch.export.load(str(tmp_path / "model.pt2"), extra_files=extra).module()
    for x in (X, X[:1]):
        with torch.no_grad():
            torch.testing.assert_close(program(x), expected(run, None, x))
    assert json.loads(extra[exporting.ABOUT])["kind"] == "generic"


def test_all_models(run: fs.Run, tmp_path: Path) -> None:
    files = [one.path.name for one in export_all(run, tmp_path / "all")]
    assert files == [*(f"client-{k}.safetensors" for k in range(3)), "generic.safetensors"]
    with pytest.raises(InputError, match="new or empty"):
        next(export_all(run, tmp_path / "all"))


def test_a_file_that_answers_otherwise_is_not_kept(run: fs.Run, tmp_path: Path, monkeypatch) -> None:
    write, load = exporting.FORMATS[".safetensors"]

    def damaged(module, x, meta, path) -> None:
        module.fc.bias.data[0] += 1e-3
        write(module, x, meta, path)

    monkeypatch.setitem(exporting.FORMATS, ".safetensors", (damaged, load))
    with pytest.raises(TrainingError, match="gives other answers than the run's"):
        export(run, tmp_path / "model.safetensors", 0)
    assert [*tmp_path.iterdir()] == []


class Counts(nn.Module):
    """A model whose path depends on the numbers, which no exporter can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if float(x.sum()) > -1e9 else self.fc(-x)


def test_what_cannot_be_exported_is_refused(run: fs.Run, tmp_path: Path) -> None:
    for file, right in (("model.pkl", "ends in .safetensors, .onnx, .pt2"), ("there.pt2", "does not exist yet")):
        (tmp_path / "there.pt2").write_bytes(b"mine")
        with pytest.raises(InputError, match=right):
            export(run, tmp_path / file)
    assert (tmp_path / "there.pt2").read_bytes() == b"mine"
    with pytest.raises(InputError, match="a number from 0 to 2"):
        export(run, tmp_path / "model.pt2", 3)
    arrays = [(torch.randn(6, 3), torch.randint(2, (6,)), torch.randn(3, 3), torch.randint(2, (3,))) for _ in range(2)]
    local = fs.simulate(fs.Local(), model=Counts(), data=fs.Federation.from_arrays(arrays, classes=2), **SETTINGS)
    with pytest.raises(InputError, match="trains no generic model"):
        export(local, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"ends in .safetensors: Counts cannot be followed"):
        export(local, tmp_path / "model.pt2", 0)
    assert [file.name for file in tmp_path.iterdir()] == ["there.pt2"]


# ---- predictions -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> fs.Run:
    root = tmp_path_factory.mktemp("sites")
    data = cities(root / "cities")
    fs.run(fs.Experiment(method=fs.FedAvg(), data=str(data), model="mlr", **SETTINGS), out=root / "run")
    return fs.load(root / "run")


def test_predictions_are_those_of_the_model(sites: fs.Run, tmp_path: Path) -> None:
    rows = [[0.5, -1.0, 2.0], [-0.3, 0.1, 0.0]]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "c"], *rows])
    state = sites.generic()
    logits = torch.tensor(rows) @ state["fc.weight"].T + state["fc.bias"]
    found = predict(sites, tmp_path / "new.csv")
    torch.testing.assert_close(found.probabilities.float(), logits.softmax(-1))
    assert found.accuracy is None
    assert [row["sample"] for row in found.rows()] == ["new.csv:0", "new.csv:1"]
    labels = logits.argmax(-1)
    np.savez(tmp_path / "new.npz", x=np.array(rows), y=np.array([int(labels[0]), 1 - int(labels[1])]))
    assert predict(sites, tmp_path / "new.npz", "rome").accuracy == 0.5
    np.savez(tmp_path / "bare.npz", x=np.array(rows))
    assert predict(sites, tmp_path / "bare.npz").labels is None


def test_samples_of_another_form_are_refused(sites: fs.Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 7)))
    with pytest.raises(InputError, match="samples of shape 7: should be samples of 3"):
        predict(sites, tmp_path / "wide.npz")
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="samples of shape 3, as the run's: these are images"):
        predict(sites, tmp_path / "a.png")


def test_images_by_the_names_of_their_classes(tmp_path: Path) -> None:
    """The classes are the run's whatever folders there are, and pixels are normalised as its own were."""
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for label, level in (("cat", 40), ("dog", 120), ("owl", 220)):
        for folder, count in (("train", 20), ("new", 3)):
            (tmp_path / folder / label).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(generator.normal(level, 15, (4, 4)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(tmp_path / folder / label / f"{i}.png")
    (tmp_path / "new" / "cat").rename(tmp_path / "cats")
    settings = {**SETTINGS, "rounds": 10, "lr": 0.5, "clients": 2, "partition": "iid"}
    fs.run(
        fs.Experiment(method=fs.FedAvg(), data=str(tmp_path / "train"), model="mlr", **settings), out=tmp_path / "run"
    )
    run = fs.load(tmp_path / "run")
    found = predict(run, tmp_path / "new")
    assert [row["label"] for row in found.rows()] == ["dog"] * 3 + ["owl"] * 3
    assert found.accuracy == 1.0
    loose = predict(run, tmp_path / "cats")
    assert loose.labels is None
    assert {row["class"] for row in loose.rows()} == {"cat"}
    (tmp_path / "new" / "fox").mkdir()
    image.fromarray(pixels).save(tmp_path / "new" / "fox" / "0.png")
    with pytest.raises(InputError, match=r"named after a class of the run.*cat, dog, owl"):
        predict(run, tmp_path / "new")


# ---- tracking --------------------------------------------------------------------------------------------------------
def tracked(name: str, folder: Path) -> fs.Run:
    return fs.run(
        fs.Experiment(method=fs.FedAvg(), clients=3, model="mlr", **SETTINGS),
        callbacks=track.trackers([name], folder, "first"),
    )


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("personal", "loss", "bytes_total"):
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [1, 2]
        assert [event.value for event in scalars] == pytest.approx([record[name] for record in run.history])


def test_mlflow_has_every_number(tmp_path: Path, monkeypatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracked("mlflow", tmp_path)
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlflow").absolute().as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "fedstill"]
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.status == "FINISHED"
    assert one.data.params["method"] == "fedavg"
    history = client.get_metric_history(one.info.run_id, "personal")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == [record["personal"] for record in run.history]


def test_wandb_runs_offline(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked("wandb", tmp_path)
    assert list((tmp_path / "wandb").rglob("*.wandb"))


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    class Broken(track.TensorBoard):
        def on_start(self, coordinator) -> None:
            raise ConnectionError("no network")

    monkeypatch.setitem(track.TRACKERS, "tensorboard", (Broken, ()))
    assert len(tracked("tensorboard", tmp_path).history) == 2
    assert capsys.readouterr().err.count("tensorboard fails, and the run goes on without it (no network)") == 1


def test_trackers_that_there_are_not() -> None:
    with pytest.raises(InputError, match="one of: mlflow, tensorboard, wandb"):
        track.check(["tensorbord"])
