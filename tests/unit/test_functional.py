"""The model as a function: BatchNorm with padding, keyed dropout, tied and frozen weights, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstill as fs
from fedstill.core import task
from fedstill.nn.mode import Execution
from fedstill.nn.net import Net

from ..problems import make, ragged

CPU, F64 = torch.device("cpu"), torch.float64


def net_of(module: nn.Module) -> Net:
    return Net(module, CPU, F64)


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 5), (7, 3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_masked_batchnorm_equals_torch_on_the_real_rows(shape: tuple[int, ...], affine: bool) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    module = kind(3, affine=affine, dtype=F64)
    net, oracle = net_of(module), kind(3, affine=affine, dtype=F64).train()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g, dtype=F64)
    padded = torch.cat([x, 100 + torch.randn((2, *shape[1:]), generator=g, dtype=F64)])
    mask = torch.tensor([1.0] * 7 + [0.0] * 2, dtype=F64)
    params = net.initial()
    out = net(params, padded, train=True, key=torch.tensor(0), mask=mask)
    assert torch.allclose(out[:7], oracle(x), atol=1e-12)
    for name, value in oracle.state_dict().items():
        assert torch.allclose(params[name].double(), value.double(), atol=1e-12), name


def test_a_batch_of_one_survives_batchnorm() -> None:
    net = net_of(nn.BatchNorm1d(3, dtype=F64))
    params = net.initial()
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=F64)
    assert torch.equal(net(params, x, train=True, key=torch.tensor(0)), torch.zeros(1, 3, dtype=F64))
    assert params["running_mean"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert params["running_var"].tolist() == pytest.approx([0.9] * 3)  # 0.9·1 + 0.1·0, never NaN


def test_dropout_is_drawn_from_the_key_and_scaled() -> None:
    net = net_of(nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.5)))
    x = torch.ones(200, 100, dtype=F64)
    once = net({}, x, train=True, key=torch.tensor(1))
    assert torch.equal(once, net({}, x, train=True, key=torch.tensor(1)))
    assert not torch.equal(once, net({}, x, train=True, key=torch.tensor(2)))
    kept = (once > 0).double().mean()
    assert abs(kept - 0.375) < 5 * np.sqrt(0.375 * 0.625 / 20000)  # both layers, independent masks
    assert once.max().item() == pytest.approx(1 / 0.75 / 0.5)
    assert torch.equal(net({}, x, train=False), x)


def test_dropout2d_drops_whole_channels() -> None:
    out = net_of(nn.Dropout2d(0.5))({}, torch.ones(50, 20, 3, 3), train=True, key=torch.tensor(1))
    per_channel = out.flatten(2)
    assert ((per_channel == 0).all(-1) | (per_channel == 2).all(-1)).all()


def test_tied_weights_stay_tied_and_are_exported_under_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    g = np.random.default_rng(0)
    fed = fs.Federation.from_arrays([(g.normal(size=(6, 3)), g.integers(0, 3, 6)) * 2 for _ in range(2)], classes=3)
    model = Tied()
    for engine in ("one", "stacked"):
        run = fs.simulate(fs.FedAvg(), model=model, data=fed, rounds=2, epochs=1, engine=engine, dtype="float64")
        state = run.generic()
        assert torch.equal(state["a.weight"], state["b.weight"])
        assert not torch.equal(state["a.weight"], model.a.weight)
        fresh = Tied().double()
        fresh.load_state_dict(state)


def test_frozen_parameters_do_not_move() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    g = np.random.default_rng(0)
    fed = fs.Federation.from_arrays([(g.normal(size=(6, 4)), g.integers(0, 3, 6)) * 2], classes=3)
    state = fs.simulate(fs.PFedSD(), model=model, data=fed, rounds=2, epochs=1, weight_decay=0.1).generic()
    assert torch.equal(state["0.weight"], model[0].weight)
    assert not torch.equal(state["2.weight"], model[2].weight)


def test_a_recurrent_model_trains_one_by_one() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    g = np.random.default_rng(0)
    fed = fs.Federation.from_arrays([(g.normal(size=(6, 5, 2)), g.integers(0, 3, 6)) * 2], classes=3)
    model = Recurrent()
    run = fs.simulate(fs.FedRep(head_epochs=1), model=model, data=fed, rounds=2)
    assert not torch.equal(run.generic()["lstm.weight_hh_l0"], model.lstm.weight_hh_l0)
    oracle = Recurrent()
    oracle.load_state_dict(run.personal(0))
    client = fed.clients[0]
    hits = (oracle.eval()(client.x_test.float()).argmax(-1) == client.y_test).double().mean()
    assert run.history[-1]["personal"] == pytest.approx(hits.item())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x + 0.1 * torch.randn_like(x))


class Odd(nn.Module):
    """A linear model that does something unusual with what it is given."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.fc, self.what = nn.Linear(4, 3), what
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.what == "assigns" and self.training:
            self.seen = self.seen + 1
        if self.what == "hides" and self.training:
            self.hidden.add_(1)
        if self.what == "drops in evaluation":
            x = F.dropout(x, 0.5)
        if self.what == "mixes in evaluation":
            x = x - x.mean(0)
        return self.fc(x).squeeze() if self.what == "squeezes" else self.fc(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.w.dtype) @ self.w).real


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Odd("assigns"), "buffer seen.*in place"),
        (Odd("hides"), "buffer hidden.*persistent"),
        (Odd("drops in evaluation"), "randomness"),
        (Odd("mixes in evaluation"), "each sample by itself"),
        (Odd("squeezes"), "for 1 samples"),
        (Complex(), "real numbers"),
        (nn.LazyLinear(3), "copied|initialized|uninitialized"),
        (None, "nn.Module"),
        ("mlp", "nn.Module"),
        (Noisy(), "randomness"),
        (nn.Linear(5, 3), "samples of shape 4"),
        (nn.Linear(4, 2), r"\[batch, 3\]"),
        (nn.Sequential(nn.Flatten()), "parameters"),
        (lambda: 3, "nn.Module"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_work(model, says: str) -> None:
    g = np.random.default_rng(0)
    fed = fs.Federation.from_arrays([(g.normal(size=(6, 4)), g.integers(0, 3, 6)) * 2], classes=3)
    with pytest.raises(fs.InputError, match=says) as error:
        fs.simulate(fs.FedAvg(), model=model, data=fed, rounds=1)
    assert error.value.field == "model"


def test_pooling_before_relu_gives_the_same_values_and_gradients() -> None:
    """Why `CNN` may write convolution → pool → ReLU where the papers write convolution → ReLU → pool."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 8, 8, generator=g, dtype=F64).round(decimals=1).requires_grad_()
    drop = (torch.rand(4, 3, 1, 1, generator=g) > 0.5).double() * 2
    weights = torch.randn(4, 3, 4, 4, generator=g, dtype=F64)
    papers = F.max_pool2d(F.relu(x * drop), 2)
    ours = F.relu(F.max_pool2d(x, 2) * drop)
    assert torch.equal(papers, ours)
    gradients = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (papers, ours)]
    assert torch.equal(*gradients)


class Coupled(nn.Module):
    """A model whose training sees other rows of the batch, in ways that a mask cannot reach."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how, self.drop = nn.Linear(4, 3), how, nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.how == "batch mean" and self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            x = x - x.mean(0)
        if self.how == "shuffled dropout":  # a mask whose samples are on no axis of their own sees the batch's size
            x = self.drop(x.t().reshape(-1)).reshape(4, -1).t()
        return self.fc(x)


@pytest.mark.parametrize("how", ["batch mean", "shuffled dropout"])
def test_a_model_that_padding_would_change_is_trained_one_by_one(how: str) -> None:
    with pytest.raises(fs.InputError, match="'one' for this model: its samples see one another"):
        run(fs.FedAvg(), data=ragged(), model=Coupled(how), engine="stacked")
    many = ragged(sizes=((3, 2),) * 12)
    plain = run(fs.FedAvg(), data=many, model=Coupled(how), engine="auto")
    assert plain.engine == "one"


def run(method: fs.Method, *, data: fs.Federation, model: nn.Module, engine: str) -> fs.Run:
    return fs.simulate(method, model=model, data=data, rounds=1, epochs=1, batch_size=2, engine=engine, dtype="float64")


def test_a_module_used_under_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.b = self.a

        def forward(self, x):
            return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = Twice().double()
    ends = {
        e: run(fs.FedRep(head_epochs=1), data=ragged(), model=model, engine=e).personal(0) for e in ("one", "stacked")
    }
    assert torch.equal(ends["one"]["a.weight"], ends["one"]["b.weight"])
    assert max((ends["one"][n] - ends["stacked"][n]).abs().max() for n in ends["one"]) < 1e-10


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("frozen", ["fc1", "fc2"])
def test_a_phase_in_which_all_is_frozen(engine: str, frozen: str) -> None:
    model = make("plain")
    model.get_submodule(frozen).requires_grad_(False)
    state = run(fs.FedRep(head_epochs=1), data=ragged(), model=model, engine=engine).personal(0)
    for name, value in model.state_dict().items():
        assert ((state[name] - value).abs().max() < 1e-15) == name.startswith(frozen)  # a mean of equals rounds


def test_a_tie_between_head_and_body_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.a.weight

        def forward(self, x):
            return self.head(self.a(x))

    with pytest.raises(fs.InputError, match=r"a.weight and head.weight are one tensor"):
        run(fs.FedRep(), data=ragged(), model=Tied(), engine="one")


def test_inside_no_grad_and_with_numpy_numbers() -> None:
    with torch.no_grad():
        result = fs.simulate(
            fs.PFedSD(), model=make("plain"), data=ragged(), rounds=np.int64(1), lr=np.float32(0.1), dtype=torch.float64,
            device=torch.device("cpu"),
        )  # fmt: skip
    assert not torch.equal(result.generic()["fc1.weight"], make("plain").fc1.weight)


def test_a_view_is_executed_in_its_own_way() -> None:
    """`under` shares the skeleton and leaves the net that it was asked of as it is."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)), torch.device("cpu"), torch.float32)
    x, params = torch.randn(2, 2, 4, 4), net.initial()
    plain = net(params, x, train=False)
    low = net.under(Execution(bf16=True, channels_last=True))
    assert low.module is net.module
    assert not torch.equal(low(params, x, train=False), plain)
    assert torch.equal(net(params, x, train=False), plain)
    assert low.fast_layout(params["0.weight"]).is_contiguous(memory_format=torch.channels_last)
    assert net.fast_layout(params["0.weight"]) is params["0.weight"]
    assert (net.execution, low.under(net.execution).execution) == (Execution(), Execution())
    with pytest.raises(dataclasses.FrozenInstanceError):
        low.execution.bf16 = False


@pytest.mark.parametrize("of", ["one weight", "no weight"])
def test_autograd_and_func_differentiate_alike(of: str) -> None:
    weights = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
    buffers = {"mean": torch.zeros((), dtype=torch.float64)}

    def objective(weights, buffers):
        seen = {"mean": buffers["mean"] + 5.0}
        return (weights["a"].pow(3).sum() if of == "one weight" else torch.ones(()).double()), seen

    with torch.no_grad():  # as scores and `finish` call it
        for differentiate in (task.by_func, task.by_autograd):
            grads, (loss, after) = differentiate(objective, weights, buffers)
            assert grads["a"].tolist() == ([3.0, 12.0] if of == "one weight" else [0.0, 0.0])
            assert grads["b"].tolist() == [0.0, 0.0, 0.0]
            assert float(loss) == (-7.0 if of == "one weight" else 1.0)
            assert float(after["mean"]) == 5.0
            assert not any(t.requires_grad for t in (*grads.values(), loss, *after.values(), *weights.values()))
