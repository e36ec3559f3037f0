"""What training never changes is a constant: its bytes, its memory, its checksum, and models whose buffers change after all."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedstill as fs
from fedstill.core import tree
from fedstill.core.errors import TrainingError
from fedstill.edge.model_store.store import ModelStore
from fedstill.nn.net import Net
from fedstill.run import cluster
from fedstill.run.prepare import from_experiment
from fedstill.transport import wire

from ..problems import Spy, distance, identical, ragged, run, states


def nets(model: nn.Module, x: Tensor, classes: int = 3) -> Net:
    net = Net(model, torch.device("cpu"), x.dtype)
    net.probe(x, (classes,))
    return net


class Wide(nn.Module):
    """A wide body, frozen but for adapters (4·(4 + 60) numbers), under a head of 60·7 + 7: 683 of 4,000 numbers train."""

    head_modules = "head"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body, self.inner, self.head = nn.Linear(4, 60), nn.Linear(60, 60), nn.Linear(60, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.body(x)))))


LORA, TRAINED = {"lora": "r=4,targets=body"}, 4 * (4 + 60) + 60 * 7 + 7


def wide(method: fs.Method, **changes: Any) -> fs.Run:
    settings = dict(rounds=2, epochs=1, batch_size=8, device="cpu", engine="one", **LORA)
    return fs.simulate(method, data=ragged(), **{"model": Wide(), **settings, **changes})


# ---- bytes -----------------------------------------------------------------------------------------------------------------
def test_exactly_the_trainable_numbers_travel() -> None:
    """In float32 four bytes for each number, and in a message nothing else but its header and that of safetensors."""
    spy = Spy()
    result = wide(fs.FedAvg(), transport=spy.transport)
    assert TRAINED == 683 == sum(v.numel() for v in result.task.net.initial().values())
    for record in result.history:
        assert record["bytes_up"] == record["bytes_down"] == 4 * 683
    assert (result.cost.numbers_up, result.cost.numbers_down) == (683, 683)
    order, reply = spy.orders[0], spy.trained()[0]
    for message in (order, reply):
        data = wire.encode(message)
        (header,) = struct.unpack_from("<Q", data)
        (names,) = struct.unpack_from("<Q", data, 8 + header)
        assert len(data) == 8 + header + 8 + names + 4 * 683


@pytest.mark.parametrize(
    ("method", "up", "kept"),
    [
        (fs.FFALoRA(), 60 * 4 + 427, 0),
        (fs.FedSALoRA(), 4 * 4, 60 * 4 + 427),
        (fs.FedPer(), 4 * (4 + 60), 427),
        (fs.PFedSD(), TRAINED, TRAINED),
        (fs.Local(), 0, TRAINED),
    ],
    ids=lambda v: v.id if isinstance(v, fs.Method) else "",
)
def test_numbers_that_a_client_sends_and_keeps(method: fs.Method, up: int, kept: int, tmp_path: Path) -> None:
    """As known from the shapes: of A 16, of B 240, of the head 427. So are a bank's row and a checkpoint."""
    result = wide(method, out=tmp_path / "run")
    assert result.cost.numbers_up == up
    memory = result.memory(0)
    assert sum(leaf.numel() for _, leaf in tree.leaves(memory)) == kept
    if kept:
        row = sum(
            -(-leaf.nbytes // 64) * 64 for _, leaf in tree.leaves(memory)
        )  # tensors begin at multiples of 64 bytes
        assert ModelStore(memory, clients=3, device=torch.device("cpu")).row_bytes == row
    in_server = sum(leaf.numel() for _, leaf in tree.leaves(result.server))
    saved = load_file(tmp_path / "run" / "checkpoints" / "round-000002.safetensors")
    numbers = sum(v.numel() for n, v in saved.items() if "|report|" not in n)
    assert numbers == in_server + 5 * kept
    constants = load_file(tmp_path / "run" / "constants.safetensors")
    assert sum(v.numel() for v in constants.values()) == 4 * 60 + 60 + 60 * 60 + 60 + (16 if up == 667 else 0)


def test_a_frozen_body_is_one_tensor_for_all(tmp_path: Path) -> None:
    """Both skeletons, the views that engines use and their trial copies hold the same memory."""
    result = wide(fs.FedAvg(), engine="stacked")
    net = result.task.net
    assert isinstance(net, Net)
    for name, value in net.constants.items():
        place, _, leaf = name.rpartition(".")
        for skeleton in (net._training, net._evaluating):
            assert skeleton.get_submodule(place)._parameters[leaf] is value
    assert result.trainer.bench.net.constants is net.constants


# ---- what is a constant ------------------------------------------------------------------------------------------------------
class Buffered(nn.Module):
    """Buffers of all kinds."""

    head_modules = "fc"

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.fc, self.bn, self.late, self.calls = nn.Linear(4, 3), nn.BatchNorm1d(4, momentum=0.0), late, 0
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("same", torch.ones(2))
        self.register_buffer("rarely", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
            self.same.mul_(1.0)
            self.calls += 1
            if self.late and self.calls > 6:
                self.rarely.add_(1.0)
        return self.fc(self.bn(x)) + 0 * self.ids


def test_buffers_that_a_training_pass_leaves_alone_are_constants() -> None:
    """What is written to moves, though its values stay; BatchNorm's statistics move, frozen or not, whatever their momentum."""
    model = Buffered()
    model.bn.requires_grad_(False)
    net = nets(model, torch.zeros(2, 4))
    assert set(net.constants) == {"ids", "rarely", "bn.weight", "bn.bias"}
    assert net.parameters == ("fc.weight", "fc.bias")
    assert set(net.buffers) == {"count", "same", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    state = net.export(net.initial())
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_buffer_that_changes_after_all_ends_the_run(engine: str) -> None:
    with pytest.raises((TrainingError, fs.InputError), match=r"rarely, which it left alone at first|in-place"):
        run(fs.FedAvg(), Buffered(late=True).double(), rounds=4, engine=engine)


def test_tied_weights_are_frozen_together() -> None:
    class Tied(nn.Module):
        head_modules = "c"

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = Tied().double()
    model.a.weight.requires_grad_(False)
    ends = [run(fs.FedAvg(), model, engine=engine) for engine in ("one", "stacked")]
    assert set(ends[0].task.net.constants) == {"a.weight"}
    assert distance(states(ends[0]), states(ends[1])) < 1e-10
    assert torch.equal(ends[0].generic()["b.weight"], model.b.weight)


# ---- folders, sites and ranks ------------------------------------------------------------------------------------------------
EXPERIMENT = dict(data="digits", clients=3, partition="iid", model="mlp", rounds=3, epochs=1, batch_size=200, device="cpu",
                  workers=1, checkpoint_every=1)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    fs.run(fs.Experiment(method=fs.FedSALoRA(), lora="r=2", **EXPERIMENT), out=out)
    return out


def test_a_folder_gives_whole_models_back_without_the_weights_that_they_began_with(tmp_path: Path) -> None:
    """A run of a module in Python, whose weights are lost: another of the same form takes the constants from the folder."""
    result = wide(fs.PFedSD(), out=tmp_path / "run", participation=1.0)
    loaded = fs.load(tmp_path / "run", model=Wide(seed=9))
    assert identical(states(result), states(loaded))
    merged = loaded.personal(1, merged=True)
    assert merged.keys() == Wide().state_dict().keys()
    module = Wide(seed=9)
    module.load_state_dict(merged)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 4))).float()
    assert (module(x) - loaded.task.predict(loaded.served(1), x)).abs().max() < 1e-6
    (tmp_path / "run" / "constants.safetensors").write_bytes(b"")
    with pytest.raises(fs.InputError, match=r"constants.safetensors is whole"):
        fs.load(tmp_path / "run", model=Wide())


def test_a_resumed_run_gives_the_same_bits_and_refuses_other_weights(tmp_path: Path) -> None:
    whole = wide(fs.FedSALoRA(), rounds=3, out=tmp_path / "whole")

    def stop(record) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wide(fs.FedSALoRA(), rounds=3, out=tmp_path / "cut", progress=stop)
    with pytest.raises(
        fs.InputError, match=r"model = [0-9a-f]{12}: should be with the frozen weights that it began with"
    ):
        wide(fs.FedSALoRA(), rounds=3, out=tmp_path / "cut", resume=True, model=Wide(seed=1))
    assert identical(states(wide(fs.FedSALoRA(), rounds=3, out=tmp_path / "cut", resume=True)), states(whole))


def test_an_experiments_constants_are_in_its_environment(folder: Path) -> None:
    about = json.loads((folder / "environment.json").read_text())
    assert len(about["constants"]) == 64
    loaded = fs.load(folder)
    assert loaded.task.net.names == ("fc1.lora_A", "fc1.lora_B", "fc2.weight", "fc2.bias")
    assert loaded.personal(0).keys() == {*loaded.task.net.names, "fc1.weight", "fc1.bias"}


def test_ranks_with_other_frozen_weights_are_refused() -> None:
    experiment = fs.Experiment(method=fs.FedAvg(), lora="r=2", **EXPERIMENT)

    class Share:
        size, rank = 2, 1

        def share(self, clients: int) -> frozenset[int]:
            return frozenset({1})

    about = {"experiments": [experiment.to_toml()], "engine": "one", "reduce": True}
    digest = from_experiment(experiment)[0].net.fixed.digest()
    cluster._clients(Share(), {**about, "constants": [digest]})
    with pytest.raises(fs.InputError, match="should be with rank 0's frozen weights"):
        cluster._clients(Share(), {**about, "constants": ["0" * 64]})


def test_runs_side_by_side_need_the_same_frozen_weights(capsys) -> None:
    """Two seeds give a model by name other weights, and FFA-LoRA another A: they go one after another, which a line says."""
    both = [
        fs.Experiment(method=fs.FFALoRA(), lora="r=2", seed=s, **{**EXPERIMENT, "engine": "stacked"}) for s in (0, 1)
    ]
    together = fs.run_together(both)
    assert "their frozen weights differ" in capsys.readouterr().err
    assert identical(states(together[1]), states(fs.run(both[1])))
