"""Following a model's channels, what of them travels, and what cannot be followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill import models
from fedstill.core import tree
from fedstill.nn.channels import Mark, follow
from fedstill.nn.net import Net
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, finish, make, needed, ragged


def test_a_flattened_image_has_its_pixels_by_channel() -> None:
    found = follow(models.build("cnn-cifar10", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32))
    assert found.out == {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84}
    assert found.fed == {"conv2": Mark(6), "fc1": Mark(16, 25), "fc2": Mark(120), "fc3": Mark(84)}
    assert found.classifier == "fc3"


@pytest.mark.parametrize(
    "name", ["mlp2", "lenet5", "resnet8", "resnet32", "resnet50", "mobilenetv2", "alexnet-bn", "digits-cnn3"]
)
def test_the_models_of_the_papers_can_be_followed(name: str) -> None:
    model = models.build(name, (3, 32, 32), 10)
    found = follow(model, torch.zeros(2, 3, 32, 32))
    layers = {
        n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.modules.batchnorm._BatchNorm)
    }
    assert set(found.out) | {found.classifier} == layers
    for entry, value in model.state_dict().items():  # every entry of the state has its place
        kept = found.shared(entry, value, 0.5)
        assert kept.numel() <= value.numel()


def test_silenced_channels_equal_a_network_without_them() -> None:
    """g_shared is the network whose private channels are cut out of the weights, layer by layer."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)
    )
    net = net.double().eval()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    channels = follow(net, x)
    functional = Net(net, torch.device("cpu"), torch.float64)
    params = functional.initial()
    shared = functional(params, x, train=False, gates=channels.gates(torch.tensor(0.5, dtype=torch.float64), False, x))
    small = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3)
    )
    small = small.double().eval()
    w = net.state_dict()
    cut = {n: channels.shared(n, v, 0.5) for n, v in w.items()}
    cut["4.weight"] = cut["4.weight"][:, :8]  # the first two channels' four pixels each
    small.load_state_dict(cut)
    assert torch.allclose(shared, small(x), atol=1e-12)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_private_channels_never_travel(engine: str, spied) -> None:
    method = fs.CD2PFed(p=0.5)
    how = Training(**{**SETTINGS, "rounds": 4}, engine=engine)
    finish(simulation.prepare(method, make("normed"), ragged(), None, how))
    for t in range(1, 5):
        k = {c: c * t // 8 for c in (6, 5)}  # ⌊0.5·t/4·C⌋
        for reply in (r for r, _ in spied if r.kind == "train" and r.round == t):
            up = {n: tuple(v.shape) for n, v in tree.leaves(reply.up["params"])}
            assert up["fc1.weight"] == (6 - k[6], 4)
            assert up["bn.running_mean"] == (6 - k[6],)
            assert up["head.0.weight"] == (5 - k[5], 6)
            assert up["head.1.bias"] == (5 - k[5],)
            assert up["head.3.weight"] == (3, 5 - k[5])
            assert up["head.3.bias"] == (3,)


def test_a_channel_that_turns_private_starts_from_its_shared_value() -> None:
    """A client that sat out while channels turned private takes their last shared values, not its own old ones."""
    method, net = fs.CD2PFed(p=1.0, smoothing=False, distill=False), make("plain")
    how = Training(**{**SETTINGS, "rounds": 6}, engine="one")
    prepared = simulation.prepare(method, net, ragged(), None, how)
    task = prepared.trainer.bench.home(3, 0, last=2)
    received = {n: torch.zeros_like(v) for n, v in prepared.initial.items()}
    own = {n: torch.ones_like(v) for n, v in prepared.initial.items()}
    combined = method.combined(task, received, {"own": own})
    # of 6 channels 3 are private now (p = 3/6) and 2 were when the client last trained (p = 2/6)
    assert combined["fc1.bias"].tolist() == [0, 0, 0, 0, 1, 1]
    assert combined["fc2.weight"][0].tolist() == [0, 0, 0, 0, 1, 1]
    assert combined["fc2.bias"].tolist() == [0, 0, 0]


class Odd(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.fc1, self.norm, self.fc2 = what, nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.wide, self.other = nn.Linear(12, 3), nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc1(x)
        if self.what == "norm":
            return self.fc2(self.norm(h))
        if self.what == "cat":
            return self.wide(torch.cat([h, h], 1))
        if self.what == "roll":
            return self.fc2(h.roll(1, 1))
        if self.what == "sum":
            return self.fc2(h + h[:, :1])
        return self.fc2(h).softmax(1)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("norm", r"norm \(LayerNorm\)"),
        ("cat", "cat"),
        ("roll", "roll.*CD²"),
        ("sum", "getitem|add"),
        ("softmax", "softmax|classifier"),
    ],
)
def test_what_cannot_be_followed_is_named_before_work(what: str, says: str) -> None:
    with pytest.raises(fs.InputError, match=says) as error:
        fs.simulate(fs.CD2PFed(), model=Odd(what), data=ragged(), rounds=1)
    assert "\n" not in str(error.value)
    assert error.value.field == "model"


@pytest.mark.parametrize(
    ("make_method", "says"),
    [
        (lambda: fs.PFedKDWCL(alpha=1.5), "alpha = 1.5"),
        (lambda: fs.PFedKDWCL(alpha=-0.1), "alpha = -0.1"),
        (lambda: fs.PFedKDWCL(tau=0), "tau = 0"),
        (lambda: fs.FedBSD(tau=0), "tau = 0"),
        (lambda: fs.FedBSD(start="middle"), "start = 'middle'"),
        (lambda: fs.SpectralCoDistillation(tau=0), "tau = 0"),
        (lambda: fs.SpectralCoDistillation(tau=1.2), "tau = 1.2"),
        (lambda: fs.CD2PFed(p=1.2), "p = 1.2"),
        (lambda: fs.CD2PFed(beta=0), "beta = 0"),
        (lambda: fs.PFedSD(stateless=True, teacher="predictions"), "teacher = 'predictions'"),
    ],
)
def test_fields_of_the_five_are_checked(make_method, says: str) -> None:
    with pytest.raises(fs.InputError, match=says):
        make_method()


def test_a_head_that_is_the_whole_model_is_refused_for_fedbsd() -> None:
    g = np.random.default_rng(0)
    fed = fs.Federation.from_arrays([(g.normal(size=(6, 4)), g.integers(0, 3, 6)) * 2], classes=3)
    with pytest.raises(fs.InputError, match="whole model"):
        fs.simulate(fs.FedBSD(), model=nn.Sequential(nn.Linear(4, 3)), head="0", data=fed, rounds=1)


BATCHNORM_GOES_UP = {  # the stated policy of each method, on a model with BatchNorm in body and head
    "local": set(),
    "fedavg": {"bn", "head.1"},
    "fedprox": {"bn", "head.1"},
    "scaffold": {"bn", "head.1"},
    "fedrep": {"bn"},
    "pfedsd": {"bn", "head.1"},
    "fedbsd": set(),
    "pfedkd-wcl": {"bn", "head.1"},
    "cd2-pfed": {"bn", "head.1"},
    "spectral": {"bn", "head.1"},
    "fedbn": set(),
    "feddyn": {"bn", "head.1"},
    "fedavgm": {"bn", "head.1"},
    "fedper": {"bn"},
    "lg-fedavg": {"head.1"},
    "fedbabu": {"bn"},
    "fedrod": {"bn", "head.1"},
    "fedgkd": {"bn", "head.1"},
    "ditto": {"bn", "head.1"},
    "pfedme": {"bn", "head.1"},
    "apfl": {"bn", "head.1"},
    "l2gd": {"bn", "head.1"},
    "per-fedavg": {"bn", "head.1"},
    "fedfomo": {"bn", "head.1"},
    "fedpac": {"bn", "head.1"},
    "fedsa-lora": {"bn"},
    "ffa-lora": {"bn", "head.1"},
    "fedgen": {"bn", "head.1"},
}


@pytest.mark.parametrize("name", fs.METHODS)
def test_batchnorms_statistics_go_where_the_method_says(name: str, spied) -> None:
    method = fs.METHODS[name]()
    training = Training(**SETTINGS, **needed(method), engine="one")
    prepared = simulation.prepare(method, make("normed"), ragged(), None, training)
    run = finish(prepared)
    names = {n.split(tree.SEPARATOR)[-1] for r, _ in spied if r.kind == "train" for n, _ in tree.leaves(r.up)}
    up = {n.removesuffix(".running_mean") for n in names if n.endswith(".running_mean")}
    assert up == BATCHNORM_GOES_UP[name]
    start = make("normed").state_dict()["bn.running_mean"]
    moved = [not torch.equal(run.personal(k)["bn.running_mean"], start) for k in range(5)]
    assert any(moved), "BatchNorm's statistics were forgotten"
