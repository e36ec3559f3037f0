"""Samples that lie as bytes on a GPU: the same floating numbers, and the same runs, as samples that do not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedstill as fs
from fedstill.data.dataset import Dataset, moments
from fedstill.data.samples import Samples
from fedstill.edge import data_manager
from fedstill.edge.data_manager import DataManager, _packed

from ..problems import identical, states

CPU = torch.device("cpu")


def pictures(channels: int = 2, seed: int = 0) -> Dataset:
    """Random images, each channel with its own brightness."""
    g = np.random.default_rng(seed)
    x = g.integers(0, g.integers(100, 256, (channels, 1, 1)), (60, channels, 3, 5)).astype(np.uint8)
    mean, std = moments(x)
    return Dataset("pictures", x, g.integers(0, 3, 60), 3, mean=mean, std=std)


@given(st.integers(1, 3), st.integers(0, 50))
def test_bytes_give_back_what_the_data_set_made_of_them(channels: int, seed: int) -> None:
    data = pictures(channels, seed)
    for source in (data, dataclasses.replace(data, mean=(), std=())):
        x = source.tensor(source.x)
        packed = _packed(x, torch.float32, source.mean, source.std)
        assert packed is not None
        assert np.array_equal(packed.raw.numpy(), source.x)
        rows = torch.tensor([[3, 1], [0, 59]])
        assert torch.equal(packed[rows], x[rows])
        assert torch.equal(packed[2:7], x[2:7])
        assert (len(packed), packed.shape, packed.dtype, packed.device) == (60, x.shape, torch.float32, CPU)
        again = packed.over(packed.tensors())
        assert torch.equal(again[rows], x[rows])
        assert torch.equal(_packed(x, torch.float64, source.mean, source.std)[:], x.double())


def test_what_is_no_image_of_bytes_stays_as_it_is() -> None:
    data = pictures()
    x = data.tensor(data.x)
    assert _packed(x, torch.float32, data.mean, data.std) is not None
    nearly = x.clone()
    nearly[-1, 0, 0, 0] += 1e-6
    for other in (nearly, x + 1e-3, x.double(), x.flatten(1), torch.full_like(x, torch.nan), 1000 * x):
        assert _packed(other, torch.float32, data.mean, data.std) is None
    assert _packed(x, torch.float32, data.mean[:1], data.std[:1]) is None  # of another number of channels
    assert _packed(x, torch.float32, (), ()) is None


def test_samples_of_floating_numbers_are_handed_out_without_a_copy() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    assert Samples(x)[2:4].data_ptr() == x[2:4].data_ptr()
    assert Samples(x).tensors().keys() == {"raw"}


class Small(nn.Module):
    """A convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 2), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


@pytest.fixture
def packing(monkeypatch):
    """Bytes on the CPU too, as on a GPU."""
    split = data_manager._split

    def start(federation: fs.Federation) -> None:
        how = (federation.mean, federation.std)
        monkeypatch.setattr(
            data_manager, "_split", lambda arrays, device, dtype, bytes_: split(arrays, device, dtype, how)
        )

    return start


@pytest.mark.parametrize("way", ["one", "plain", "traced"])
def test_runs_on_bytes_are_the_same_to_the_bit(way: str, packing) -> None:
    data = fs.Federation.from_dataset(pictures(), partition="dirichlet:0.5", clients=4, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Small()
    engine = "one" if way == "one" else "stacked"
    how = dict(
        rounds=2,
        epochs=1,
        batch_size=4,
        engine=engine,
        device="cpu",
        workers=1,
        compile="traced" if way == "traced" else "auto",
    )
    plain = fs.simulate(fs.PFedSD(teacher="predictions"), model=model, data=data, **how)
    assert DataManager(data, CPU, torch.float32).train.x.values is None
    packing(data)
    assert DataManager(data, CPU, torch.float32).train.x.raw.dtype == torch.uint8
    packed = fs.simulate(fs.PFedSD(teacher="predictions"), model=model, data=data, **how)
    assert packed.trainer.bench.data.test.x.values is not None
    assert identical(states(plain), states(packed))
    assert [r["personal_clients"] for r in plain.history] == [r["personal_clients"] for r in packed.history]
    assert plain.new() == packed.new()
    assert plain.fine_tuned(1) == packed.fine_tuned(1)
