"""Models as users bring them: what they draw, attention and recurrent layers against torch's own, ids, outputs of all kinds."""

from __future__ import annotations

import contextlib
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import fedstill as fs
from fedstill.data.dataset import dataset
from fedstill.nn.attention import attend
from fedstill.nn.mode import Execution
from fedstill.nn.net import Net

from ..problems import SETTINGS, distance, states

CPU, F64 = torch.device("cpu"), torch.float64


class Call(nn.Module):
    """A linear layer on what a function makes of its input in training."""

    def __init__(self, function, wide: int = 4) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(wide, 3, dtype=F64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function(x) if self.training else x)


class Drawn(nn.Module):
    """What a function draws, for a shape that its input has."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def drawn(function, x: Tensor, key: int = 1) -> Tensor:
    return Net(Drawn(function), CPU, F64)({}, x, train=True, key=torch.tensor(key))


def stochastic_depth(x: Tensor) -> Tensor:
    """What torchvision's does: memory of its own, filled in place."""
    keep = torch.empty([len(x)] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x * keep.bernoulli_(0.75).div_(0.75)


def drop_path(x: Tensor) -> Tensor:
    """What timm's does."""
    return x * x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(0.75).div_(0.75)


# ---- what is drawn -----------------------------------------------------------------------------------------------------
N = 40_000
SELU = (F.selu(torch.tensor(-1e9, dtype=F64)) * 1.0).item()  # −λα
MOMENTS = {  # of what is made of ones (or of the shape alone): mean and variance by theory
    "dropout": (lambda x: F.dropout(x, 0.2), 1, 0.25),
    "dropout1d": (lambda x: F.dropout1d(x.reshape(-1, 4, 1), 0.2).reshape(x.shape), 1, 0.25),
    "stochastic depth": (stochastic_depth, 1, 1 / 3),
    "drop path": (drop_path, 1, 1 / 3),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "bernoulli method": (lambda x: (x * 0.3).bernoulli(), 0.3, 0.21),
    "rand": (lambda x: torch.rand(x.shape, dtype=F64), 0.5, 1 / 12),
    "rand of sizes": (lambda x: torch.rand(*x.shape, dtype=F64), 0.5, 1 / 12),
    "rand_like": (torch.rand_like, 0.5, 1 / 12),
    "uniform_": (lambda x: torch.empty_like(x).copy_(x).uniform_(-1, 3), 1, 4 / 3),
    "randn": (lambda x: torch.randn(x.shape, dtype=F64), 0, 1),
    "randn_like": (torch.randn_like, 0, 1),
    "normal_": (lambda x: x.clone().normal_(mean=2, std=0.5), 2, 0.25),
    "exponential_": (lambda x: x.clone().exponential_(2.0), 0.5, 0.25),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x.reshape(-1, 2) * 0, hard=True).reshape(x.shape), 0.5, 0.25),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.5, training=True), -0.3, 0.16 / 12),
    "alpha_dropout": (  # an input of mean 0 and variance 1 keeps both
        lambda x: F.alpha_dropout(torch.where(torch.arange(x.numel()) % 2 == 0, 1.0, -1.0).reshape(x.shape), 0.2, True),
        0,
        1,
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_draws_have_the_moments_of_theory(name: str) -> None:
    function, mean, variance = MOMENTS[name]
    x = torch.ones(N // 4, 4, dtype=F64)
    before = torch.get_rng_state()
    values = drawn(function, x)
    independent = values[:, 0] if name in ("stochastic depth", "drop path") else values.flatten()
    error = math.sqrt(variance / len(independent))
    assert abs(float(independent.mean()) - mean) < 5 * error
    assert float(independent.var()) == pytest.approx(variance, rel=0.1)
    assert torch.equal(values, drawn(function, x))
    assert not torch.equal(values, drawn(function, x, key=2))
    assert torch.equal(values[:7], drawn(function, x[:7]))  # a sample's draws do not depend on how many there are
    assert torch.equal(before, torch.get_rng_state()), "a global generator was used"


def test_a_path_is_dropped_for_whole_samples() -> None:
    for function in (stochastic_depth, drop_path):
        out = drawn(function, torch.ones(50, 3, 2, dtype=F64)).flatten(1)
        assert {float(v) for v in out.flatten()} == {0.0, 1 / 0.75}
        assert (out == out[:, :1]).all()


@pytest.mark.parametrize("function", [lambda x: F.dropout(x, 0.3), stochastic_depth, drop_path, torch.randn_like])
def test_draws_are_each_clients_own_in_a_stack(function) -> None:
    x, keys = torch.ones(2, 5, 4, dtype=F64), torch.tensor([3, 8])
    net = Net(Drawn(function), CPU, F64)
    stacked = vmap(lambda x, key: net({}, x, train=True, key=key))(x, keys)
    for k in range(2):
        assert torch.equal(stacked[k], net({}, x[k], train=True, key=keys[k]))


class Named(nn.Module):
    def __init__(self, draw, p: float = 0.0) -> None:
        super().__init__()
        self.p, self.draw = p, draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) if self.training else x


class Always(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (
            Named(lambda x: x[:, torch.randperm(4)], p=0.2),
            r"0 \(Named\).*torch's randperm.*set its p = 0 instead of 0.2",
        ),
        (Named(lambda x: x * random.random()), r"0 \(Named\).*random or numpy.random, which have no keys"),
        (Named(lambda x: x + np.random.normal()), r"0 \(Named\).*random or numpy.random"),
        (Named(lambda x: x.bernoulli(0.5, generator=torch.Generator())), "generator"),
        (Always(), r"0 \(Always\).*torch's dropout, in evaluation"),
    ],
)
def test_what_has_no_key_is_refused_by_the_module_that_draws(inner: nn.Module, says: str) -> None:
    before = random.getstate(), np.random.get_state()[2]
    with pytest.raises(fs.InputError, match=says) as error:
        fs.simulate(fs.FedAvg(), model=nn.Sequential(inner, nn.Linear(4, 3)), data=numbers(), rounds=1)
    assert error.value.field == "model"
    assert before == (random.getstate(), np.random.get_state()[2])


# ---- attention and recurrent layers against torch's own ------------------------------------------------------------------
KEEP = torch.tensor([[True, True, False, False], [True] * 4, [False, False, False, True], [True, False, True, True]])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"attn_mask": KEEP},
        {"attn_mask": torch.where(KEEP, 0.5, -torch.inf).double()},
        {"scale": 0.3},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "mask", "bias", "scale", "groups"],
)
def test_attention_equals_torchs(how: dict) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 4, 3, generator=g, dtype=F64)
    k, v = (torch.randn(2, 2 if "enable_gqa" in how else 4, 4, 3, generator=g, dtype=F64) for _ in range(2))

    def ours(q: Tensor) -> Tensor:
        mask, causal = how.get("attn_mask"), how.get("is_causal", False)
        return attend(q, k, v, mask, causal, how.get("scale"), how.get("enable_gqa", False), lambda w: w)

    oracle = lambda q: F.scaled_dot_product_attention(q, k, v, **how)  # noqa: E731
    assert torch.allclose(ours(q), oracle(q), atol=1e-12)
    slopes = [
        torch.autograd.grad((f(p) ** 2).sum(), p)[0] for f in (ours, oracle) for p in [q.clone().requires_grad_()]
    ]
    assert torch.allclose(*slopes, atol=1e-12)
    assert torch.isfinite(vmap(grad(lambda q: grad(lambda q: (ours(q) ** 2).sum())(q).sum()))(q[None])).all()


def test_where_nothing_may_be_attended_to_attention_is_zero() -> None:
    q = torch.ones(1, 1, 2, 3, dtype=F64, requires_grad=True)
    out = attend(q, q, q, torch.tensor([[True, True], [False, False]]), False, None, False, lambda w: w)
    assert torch.equal(out[0, 0, 1], torch.zeros(3, dtype=F64))
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()


LAYERS = {
    "lstm": nn.LSTM(3, 4, num_layers=2, bidirectional=True, dtype=F64),
    "lstm projected": nn.LSTM(3, 4, proj_size=2, batch_first=True, dtype=F64),
    "lstm unbiased": nn.LSTM(3, 4, proj_size=2, num_layers=2, bias=False, dtype=F64),
    "gru": nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True, dtype=F64),
    "gru unbiased": nn.GRU(3, 4, bias=False, dtype=F64),
    "rnn": nn.RNN(3, 4, num_layers=2, dtype=F64),
    "relu": nn.RNN(3, 4, nonlinearity="relu", dtype=F64),
    "lstm cell": nn.LSTMCell(3, 4, dtype=F64),
    "gru cell": nn.GRUCell(3, 4, dtype=F64),
    "rnn cell": nn.RNNCell(3, 4, bias=False, dtype=F64),
}


class Flat(nn.Module):
    """A recurrent layer or cell, all of whose results are one tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        parts = [out] if isinstance(out, Tensor) else [out[0], *(out[1] if isinstance(out[1], tuple) else out[1:])]
        return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_step_by_step_equal_torchs(name: str) -> None:
    net = Net(Flat(LAYERS[name]), CPU, F64)
    x = torch.randn(*(() if "cell" in name else (2,)), 5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    params = {n: p.requires_grad_() for n, p in net.initial().items()}
    ways = [n(params, x, train=True) for n in (net, net.under(Execution(plain=True)))]
    assert torch.allclose(*ways, atol=1e-13)
    slopes = [torch.autograd.grad(w.square().sum(), list(params.values())) for w in ways]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*slopes, strict=True))
    stack = {n: torch.stack([p, 2 * p]).detach() for n, p in params.items()}
    both = vmap(lambda p: net(p, x, train=False))(stack)
    assert torch.allclose(both[0], ways[0], atol=1e-13)


def test_packed_sequences_go_one_by_one() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            lengths = 1 + (x[:, 1:] > 0).sum(1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.gru(packed)[1][-1])

    with pytest.raises(fs.InputError, match="engine = 'stacked': should be 'one' for this model"):
        fs.simulate(fs.FedAvg(), model=Packed(), data=numbers(), rounds=1, engine="stacked")
    assert fs.simulate(fs.FedAvg(), model=Packed(), data=numbers(12), rounds=1, epochs=1).engine == "one"


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "time first"])
def test_encoders_take_no_fast_path(first: bool, monkeypatch) -> None:
    """Nested tensors and fused layers: scoring could not be vmapped, and would have other numbers than training."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=first, dtype=F64), 1)
    net, x = Net(encoder, CPU, F64), torch.randn(3, 5, 4, dtype=F64)
    params, slow = net.initial(), encoder.eval()(x.clone().requires_grad_())  # with a gradient torch has none either
    monkeypatch.delattr(torch, "_transformer_encoder_layer_fwd")
    monkeypatch.delattr(torch, "_native_multi_head_attention")
    with torch.no_grad():
        out = net(params, x, train=False)
        stacked = vmap(lambda p: net(p, x, train=False))({n: torch.stack([p, p]) for n, p in params.items()})
        with pytest.raises(AttributeError) if first else contextlib.nullcontext():
            encoder(x)  # as torch runs it by itself
    assert torch.allclose(out, slow, atol=1e-12)
    assert torch.allclose(stacked[1], slow, atol=1e-12)


def test_padding_a_batch_changes_no_draw_wherever_the_samples_are() -> None:
    """Time first, so that the samples are the second axis of dropout's masks."""
    torch.manual_seed(0)

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, dropout=0.3, dtype=F64)
            self.drop, self.fc = nn.Dropout(0.4), nn.Linear(4, 3, dtype=F64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(x.transpose(0, 1))
            return self.fc(self.drop(self.attend(x, x, x)[0]).mean(0))

    net, x = Net(Timed(), CPU, F64), torch.randn(6, 5, 4, dtype=F64)
    net.probe(x, (3,))
    assert net.axes == {1: 1, 3: 1}  # the second draw is attention's: [samples·heads, time, time]
    whole = net(net.initial(), x, train=True, key=torch.tensor(5))
    assert torch.allclose(whole[:4], net(net.initial(), x[:4], train=True, key=torch.tensor(5)), atol=1e-13)


# ---- ids and outputs ---------------------------------------------------------------------------------------------------------
class Words(nn.Module):
    def __init__(self, words: int = 9) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        return self.head(self.embed(ids).mean(1))


def numbers(clients: int = 2) -> fs.Federation:
    g = np.random.default_rng(0)
    return fs.Federation.from_arrays(
        [(g.normal(size=(6, 4)), g.integers(0, 3, 6)) * 2 for _ in range(clients)], classes=3
    )


def tokens(clients: int = 2, kind: type = np.int32) -> fs.Federation:
    g = np.random.default_rng(0)
    sites = [(g.integers(0, 9, (6, 5)).astype(kind), g.integers(0, 3, 6)) * 2 for _ in range(clients)]
    return fs.Federation.from_arrays(sites, classes=3)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_ids_stay_whole_numbers_everywhere(engine: str) -> None:
    data = tokens()
    assert data.clients[0].x_train.dtype == torch.int64
    settings = {
        **SETTINGS,
        "rounds": 1,
        "engine": engine,
        "fine_tune": 1,
        "new": True,
        "train_scores": True,
        "averaged": True,
    }
    run = fs.simulate(fs.PFedSD(), model=Words(), data=data, **settings)
    assert run.cost.flops is not None  # counted on ids, too
    oracle = Words().double()
    oracle.load_state_dict(run.personal(0))
    client = data.clients[0]
    right = (oracle(client.x_test).argmax(-1) == client.y_test).sum()
    assert run.history[-1]["personal_clients"]["0"] == pytest.approx(float(right) / 6)


def test_whole_numbers_are_numbers_for_a_model_of_numbers() -> None:
    g = np.random.default_rng(0)
    ids = [(g.integers(0, 9, (6, 4)), g.integers(0, 3, 6)) * 2 for _ in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    whole, floating = (
        fs.simulate(fs.FedAvg(), model=model, data=fs.Federation.from_arrays(sites, classes=3), rounds=1)
        for sites in (ids, [tuple(a.astype(float) if a.ndim > 1 else a for a in site) for site in ids])
    )
    assert distance(states(whole), states(floating)) == 0


def test_an_id_that_the_vocabulary_has_not_is_refused_before_work() -> None:
    with pytest.raises(fs.InputError, match="data = the id 8: should be from 0 to 7, as embed of the model has"):
        fs.simulate(fs.FedAvg(), model=Words(8), data=tokens(), rounds=1)


def test_ids_of_a_file_are_kept_and_mixed_ones_become_numbers() -> None:
    g = np.random.default_rng(0)
    x, y = g.integers(0, 9, (6, 5)).astype(np.int16), g.integers(0, 3, 6)
    assert dataset("d", "f", x, y).tensors()[0].dtype == torch.int64
    mixed = dataset("d", "f", x, y, (x + 0.5, y))
    assert mixed.tensors()[0].dtype == torch.float32
    assert dataset("d", "f", x.astype(np.uint8), y).x.dtype == np.uint8


@pytest.mark.parametrize(
    "wrapped", [lambda z: SimpleNamespace(logits=z), lambda z: {"loss": None, "logits": z}, lambda z: (z, None)]
)
def test_outputs_of_libraries_are_read(wrapped) -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return wrapped(super().forward(x))

    torch.manual_seed(0)
    model, plain = Wrapped(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    ends = [
        states(fs.simulate(fs.PFedSD(), model=m, data=numbers(), rounds=1, engine=engine, dtype="float64"))
        for m in (model, plain)
        for engine in ("one", "stacked")
    ]
    assert max(distance(ends[0], end) for end in ends) < 1e-12
