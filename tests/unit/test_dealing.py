"""What the experiment leaves to the data: how it is divided, and among how many."""

from pathlib import Path

import numpy as np
import pytest

import fedstill as fs
from fedstill.run.prepare import federation_of


def silos(folder: Path, count: int) -> Path:
    g = np.random.default_rng(0)
    folder.mkdir()
    for k in range(count):
        rows = np.column_stack([g.normal(size=(12, 3)), g.integers(0, 2, 12)])
        np.savetxt(folder / f"site{k}.csv", rows, delimiter=",", header="a,b,c,label", comments="")
    return folder


def test_a_users_silos_are_the_clients(tmp_path: Path) -> None:
    experiment = fs.Experiment(method=fs.FedAvg(), data=str(silos(tmp_path / "sites", 3)), rounds=1, model="mlp")
    run = fs.run(experiment, out=tmp_path / "run")
    assert len(run.history[0]["personal_clients"]) == 3
    saved = fs.Experiment.from_toml(tmp_path / "run" / "experiment.toml")
    assert (saved.partition, saved.clients) == ("owner", 3)
    assert len(fs.resume(tmp_path / "run").history) == 1
    with pytest.raises(fs.InputError, match="clients = 5"):
        federation_of(fs.Experiment(data=str(tmp_path / "sites"), clients=5))


def test_other_data_is_dealt_to_twenty_by_dirichlet() -> None:
    fed = federation_of(fs.Experiment())
    assert len(fed) == 20
    assert (fed.partition_record["kind"], fed.partition_record["parameter"]) == ("dirichlet", 0.1)
    assert len(federation_of(fs.Experiment(clients=7, partition="iid"))) == 7


def test_a_saved_partition_is_used_again(tmp_path: Path) -> None:
    fs.run(fs.Experiment(method=fs.FedAvg(), rounds=1, epochs=1, clients=6, seed=3), out=tmp_path / "run")
    again = federation_of(fs.Experiment(partition=f"file:{tmp_path / 'run' / 'partition.json'}", seed=99))
    first = federation_of(fs.Experiment(clients=6, seed=3))
    assert again.hash == first.hash
    assert again.checksum() == first.checksum()  # the same samples for training and testing


def test_the_synthetic_generator_comes_with_its_clients() -> None:
    fed = federation_of(fs.Experiment(data="synthetic:0.5,0.5,10"))
    assert len(fed) == 10
    assert fed.shape == (60,)


def test_labels_beyond_any_sense_are_refused_at_once(tmp_path: Path) -> None:
    x, y = np.zeros((12, 3), "float32"), np.arange(12) % 2
    for label in (2_000_000_000, 1e19, -1):
        np.savez(tmp_path / "mine.npz", x=x, y=np.where(np.arange(12) == 7, label, y))
        with pytest.raises(fs.InputError, match=r"label .* of sample 7"):
            federation_of(fs.Experiment(data=str(tmp_path / "mine.npz"), clients=2))
    assert fs.Federation.from_arrays([(x, y, x, y)], classes=y.max() + 1).classes == 2
