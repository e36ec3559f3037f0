"""Every method with a transformer and a recurrent net on tokens: stacked equals one, or it is refused in a line."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstill as fs

from ..problems import CLASSES, SETTINGS, distance, states
from .table import ROWS, Row

WORDS, LENGTH = 7, 4


class Encoder(nn.Module):
    """A transformer with default dropout (0.1) that leaves padding, the id 0, out of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        return self.head(self.encode(self.embed(ids), src_key_padding_mask=padding)[:, 0])


class Recurrent(nn.Module):
    """Two layers of LSTM, time first, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, 5), nn.LSTM(5, 4, num_layers=2, dropout=0.2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids).transpose(0, 1))[0][-1])


MODELS = {"encoder": Encoder, "recurrent": Recurrent}


@functools.cache
def sentences() -> fs.Federation:
    """Three clients of sequences that begin with a word and may end with padding."""
    g = np.random.default_rng(3)

    def tokens(n: int) -> np.ndarray:
        ids = g.integers(1, WORDS, (n, LENGTH))
        return np.where(np.arange(LENGTH) < g.integers(1, LENGTH + 1, (n, 1)), ids, 0)

    clients = [(tokens(n), g.integers(0, CLASSES, n), tokens(2), g.integers(0, CLASSES, 2)) for n in (7, 4, 1)]
    return fs.Federation.from_arrays(clients, classes=CLASSES)


def make(model: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return MODELS[model]().double()


def trained(row: Row, model: str, engine: str, **changes) -> fs.Run:
    settings = {**SETTINGS, "rounds": 2, "epochs": 1, "participation": 0.7, **row.settings, "engine": engine, **changes}
    return fs.simulate(row.method, model=make(model), data=sentences(), **settings)


FIRST = {
    row.method.id: row for row in reversed(ROWS)
}  # each method's first row has both models, its variants one of them
CASES = [
    (row, model)
    for i, row in enumerate(ROWS)
    for j, model in enumerate(MODELS)
    if FIRST[row.method.id] is row or ((i + j) % 2 and row.method.id != "cd2-pfed")
]


@pytest.mark.parametrize(("row", "model"), CASES, ids=lambda v: v.name if isinstance(v, Row) else v)
def test_stacked_equals_one(row: Row, model: str) -> None:
    if row.method.id == "cd2-pfed":  # the one that divides layers into channels
        with pytest.raises(fs.InputError, match="CD² cannot follow this one"):
            trained(row, model, "one")
        return
    one, stacked = (trained(row, model, engine) for engine in ("one", "stacked"))
    assert distance(states(one), states(stacked)) < 1e-10
    for a, b in zip(one.history, stacked.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
        assert a["personal_clients"] == b["personal_clients"]
    start = one.task.net.initial()  # adapters too, without what is frozen
    assert any((s[n] - v).abs().max() > 1e-4 for s in states(one).values() for n, v in start.items()), "nothing moved"


@pytest.mark.parametrize(("method", "model", "share"), [(fs.PFedSD(), "encoder", 0.7), (fs.FedAvg(), "recurrent", 0.3)])
def test_a_traced_program_equals_one(method: fs.Method, model: str, share: float, traced, capsys) -> None:
    row = Row(method, lambda _: None, settings={"participation": share})
    one, program = trained(row, model, "one"), trained(row, model, "stacked")
    assert distance(states(one), states(program)) < 1e-10
    stages = list(program.trainer.engine.programs.stages.values())
    assert stages
    assert None not in stages
    assert capsys.readouterr().err == ""  # nothing fell back
