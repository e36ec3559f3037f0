"""A model that writes ReLU before max-pooling runs with the pool first: the same bits, or as it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedstill as fs
from fedstill.nn.mode import Execution
from fedstill.nn.net import Net
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import identical, ragged, states

SHAPE = (2, 9, 9)
Middle = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A convolution, whatever `middle` does with it, and a linear layer."""

    head_modules = "fc"

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.conv, self.bn, self.pool = nn.Conv2d(2, 5, 2), nn.BatchNorm2d(5), nn.MaxPool2d(2)
        self.relu, self.over = nn.ReLU(), nn.ReLU(inplace=True)
        self.register_buffer("seen", torch.zeros(()))
        self.middle = middle
        with torch.no_grad():
            self.fc = nn.Linear(self._body(torch.zeros(2, *SHAPE)).shape[1], 3)

    def _body(self, x: Tensor) -> Tensor:
        return self.middle(self, x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self._body(x))


def made(middle: Middle, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model(middle).to(dtype)


def data(dtype: torch.dtype, rows: int = 6) -> Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


def net_of(model: nn.Module, fast: bool, dtype: torch.dtype = torch.float32, **how) -> Net:
    net = Net(model, torch.device("cpu"), dtype)
    net.probe(data(dtype, 2), (3,))
    return net.under(Execution(channels_last=True, pool_first=fast), **how)


class Work(TorchDispatchMode):
    """Counts the elements that ReLU is given."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.relu.default, torch.ops.aten.relu_.default):
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def passed(net: Net, x: Tensor, train: bool) -> tuple[list[Tensor], int]:
    """Output, gradients and state after a pass from whole-numbered weights (many ties, many zeros); and ReLU's work."""
    g = torch.Generator().manual_seed(2)
    params = {
        name: net.fast_layout((2 * torch.randn(value.shape, generator=g)).round().to(value.dtype).abs_())
        if "running_var" in name
        else net.fast_layout((2 * torch.randn(value.shape, generator=g)).round().to(value.dtype))
        for name, value in net.initial().items()
    }
    weights = [params[name].requires_grad_() for name in net.parameters]
    with Work() as work:
        out = net(params, x, train=train, key=torch.tensor(5))
    uneven = torch.randn(out.shape, generator=g).to(out.dtype)
    slopes = torch.autograd.grad((out * uneven).sum(), weights, allow_unused=True, materialize_grads=True)
    return [out.detach(), *slopes, *(value.detach() for value in params.values())], work.elements


EXCHANGED: dict[str, Middle] = {
    "functions": lambda m, x: F.max_pool2d(F.relu(m.conv(x)), 2),
    "torch": lambda m, x: torch.max_pool2d(torch.relu(m.conv(x)), (2, 2)),
    "method": lambda m, x: F.max_pool2d(m.conv(x).relu(), kernel_size=2),
    "modules": lambda m, x: m.pool(m.relu(m.conv(x))),
    "in place": lambda m, x: m.pool(m.over(m.conv(x))),
    "in place, by functions": lambda m, x: F.max_pool2d(F.relu(m.bn(m.conv(x)), inplace=True), 2),
    "in place, by a method": lambda m, x: m.pool(m.conv(x).relu_()),
    "windows that overlap": lambda m, x: F.max_pool2d(F.relu(m.conv(x)), 3, 2),
    "padding": lambda m, x: F.max_pool2d(F.relu(m.conv(x)), 3, 2, padding=1),
    "ceil and dilation": lambda m, x: F.max_pool2d(F.relu(m.conv(x)), (2, 3), 2, dilation=2, ceil_mode=True),
    "two pools": lambda m, x: m.pool(m.pool(m.relu(m.conv(x)))),
    "BatchNorm and dropout": lambda m, x: F.dropout(m.pool(m.relu(m.bn(m.conv(x)))), 0.4, m.training),
    "what ReLU was given is used again": lambda m, x: (y := m.conv(x)).mean((2, 3)) + m.pool(m.relu(y)).amax((2, 3)),
    "a branch on training": lambda m, x: m.pool(m.relu(m.conv(x) if m.training else m.conv(x) * 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EXCHANGED)
def test_the_pool_comes_first_and_the_bits_are_the_same(name: str, dtype: torch.dtype) -> None:
    model = made(EXCHANGED[name], dtype)
    written, ours = net_of(model, False, dtype), net_of(model, True, dtype)
    x = data(dtype).round()
    for train in (True, False):
        (expected, before), (found, after) = passed(written, x, train), passed(ours, x, train)
        assert after < before
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def overwritten(m: Model, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.pool(m.over(y)).mean((2, 3)) + y.mean((2, 3))  # y is what the ReLU left


def through_a_view(m: Model, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.pool(m.over(y.view(y.shape))).mean((2, 3)) + y.mean((2, 3))


def changed_meanwhile(m: Model, x: Tensor) -> Tensor:
    y = m.conv(x) + 0
    z = m.relu(y)
    y.add_(1)
    return m.pool(z)


def counting(m: Model, x: Tensor) -> Tensor:
    m.seen.add_(1.0)
    return m.pool(m.relu(m.conv(x))) if float(m.seen) > 0 else x


LEFT: dict[str, Middle] = {
    "pool first as it is": lambda m, x: m.relu(m.pool(m.conv(x))),
    "mean": lambda m, x: F.avg_pool2d(m.relu(m.conv(x)), 2),
    "another activation": lambda m, x: m.pool(F.leaky_relu(m.conv(x))),
    "two users": lambda m, x: (y := m.relu(m.conv(x))).mean((2, 3)) + m.pool(y).mean((2, 3)),
    "indices": lambda m, x: F.max_pool2d(m.relu(m.conv(x)), 2, return_indices=True)[0],
    "a branch on a value": lambda m, x: m.pool(m.relu(m.conv(x) if x.sum() < 1e9 else x)),
    "overwritten": overwritten,
    "overwritten through a view": through_a_view,
    "changed meanwhile": changed_meanwhile,
    "a count and a branch on it": counting,
}


@pytest.mark.parametrize("name", LEFT)
def test_other_models_run_as_they_are_written(name: str) -> None:
    model = made(LEFT[name])
    written, ours = net_of(model, False), net_of(model, True)
    for train in (True, False):
        (expected, before), (found, after) = (
            passed(written, data(torch.float32), train),
            passed(ours, data(torch.float32), train),
        )
        assert before == after
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_user_s_hooks_are_called() -> None:
    model, calls = made(EXCHANGED["functions"]), []
    model.register_forward_hook(lambda *_: calls.append(1))
    net = net_of(model, True)
    calls.clear()
    net(net.initial(), data(torch.float32), train=False)
    assert calls == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m, x: m.forward(x) * 1.0001,
        lambda m, x: m.fc(m._body(x).detach()),  # the output is right
        lambda m, x: m.forward(x) + 0 * m.seen.add_(1.0),  # the buffer is not
        lambda m, x: m.nothing(x),
    ],
    ids=["output", "gradient", "buffer", "error"],
)
def test_an_exchange_that_goes_wrong_is_found_out(wrong) -> None:
    model = made(EXCHANGED["functions"])
    x = data(torch.float32)
    expected, before = passed(net_of(model, False), x, True)
    found, after = passed(net_of(model, True, rewrite=lambda module: wrong), x, True)
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_taps_see_the_model_as_it_is_written() -> None:
    model, x = made(EXCHANGED["modules"]), data(torch.float32)
    net = net_of(model, True)
    taps = {"pool": x}
    out = net(net.initial(), x, train=False, taps=taps)
    assert torch.equal(taps["pool"], F.relu(model.conv(x)).contiguous(memory_format=torch.channels_last))
    assert torch.equal(out, net(net.initial(), x, train=False))
    assert (
        passed(net, x, False)[1] < passed(net_of(model, False), x, False)[1]
    )  # and afterwards the pool is first again


@pytest.mark.parametrize("method", [fs.FedAvg(), fs.PFedSD(), fs.FedRep(), fs.FedRoD()], ids=lambda m: m.id)
def test_a_run_has_the_same_bits_with_and_without(method: fs.Method) -> None:
    model = made(EXCHANGED["BatchNorm and dropout"])
    how = dict(rounds=2, epochs=1, batch_size=4, device="cpu", engine="one", workers=1)
    runs = [fs.simulate(method, model=model, data=ragged(shape=SHAPE), fast=fast, **how) for fast in (True, False)]
    assert identical(*(states(run) for run in runs))
    assert runs[0].history[-1]["loss"] == runs[1].history[-1]["loss"]


@pytest.mark.parametrize(
    ("engine", "fast", "first"), [("one", True, True), ("one", False, False), ("stacked", True, False)]
)
def test_the_setting_decides(engine: str, fast: bool, first: bool) -> None:
    model = made(EXCHANGED["functions"])
    settings = Training(rounds=1, batch_size=4, device="cpu", engine=engine, fast=fast)
    net = simulation.prepare(fs.FedAvg(), model, ragged(shape=SHAPE), None, settings).trainer.bench.task.net
    work = [passed(n, data(torch.float32), True)[1] for n in (net, net_of(model, False))]
    assert (work[0] < work[1]) is first
