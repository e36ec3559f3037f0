"""The larger image models: published sizes, shapes they take, graphs that can be followed, and both engines alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fedstill as fs
from fedstill import models
from fedstill.models.alexnet import AlexNet
from fedstill.models.mobilenet import InvertedResidual
from fedstill.models.resnet import Basic, Bottleneck, ResNet, Zeros
from fedstill.nn.split import by_head

from ..problems import distance, states

IMAGE_MODELS = (
    "resnet8", "resnet32", "resnet18", "resnet34", "resnet50", "mobilenetv2", "alexnet", "alexnet-bn", "digits-cnn3",
    "digits-cnn6",
)  # fmt: skip


def parameters(name: str, shape: tuple[int, ...], classes: int) -> int:
    with torch.device("meta"):  # sizes only: no numbers are drawn
        return sum(p.numel() for p in models.MODELS[name][0](shape, classes).parameters())


# ---- sizes, layer by layer --------------------------------------------------------------------------------------------
def conv(a: int, b: int, k: int) -> int:
    """A convolution without bias, and its BatchNorm."""
    return a * b * k * k + 2 * b


def fc(a: int, b: int) -> int:
    return a * b + b


RESNET8 = (
    conv(3, 16, 3)
    + 2 * conv(16, 16, 3)
    + conv(16, 32, 3) + conv(32, 32, 3) + conv(16, 32, 1)
    + conv(32, 64, 3) + conv(64, 64, 3) + conv(32, 64, 1)
    + fc(64, 10)
)  # fmt: skip
RESNET32 = (
    conv(3, 16, 3)
    + 10 * conv(16, 16, 3)
    + conv(16, 32, 3) + 9 * conv(32, 32, 3)
    + conv(32, 64, 3) + 9 * conv(64, 64, 3)
    + fc(64, 10)
)  # fmt: skip
RESNET18 = (
    conv(3, 64, 3)
    + 4 * conv(64, 64, 3)
    + conv(64, 128, 3) + 3 * conv(128, 128, 3) + conv(64, 128, 1)
    + conv(128, 256, 3) + 3 * conv(256, 256, 3) + conv(128, 256, 1)
    + conv(256, 512, 3) + 3 * conv(512, 512, 3) + conv(256, 512, 1)
    + fc(512, 10)
)  # fmt: skip
DIGITS3 = (
    fc(3 * 25, 64) + fc(64 * 25, 64) + fc(64 * 25, 128)
    + fc(6272, 2048) + fc(2048, 512) + fc(512, 10)
    + 2 * (64 + 64 + 128 + 2048 + 512)
)  # fmt: skip
DIGITS6 = DIGITS3 + 2 * fc(64 * 25, 64) + fc(128 * 25, 128) + 2 * (64 + 64 + 128)
ALEXNET_NORMS = 2 * (64 + 192 + 384 + 256 + 256 + 4096 + 4096)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        # At 1000 classes and 3×224×224: the numbers that torchvision publishes with its weights.
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet34", (3, 224, 224), 1000, 21_797_672),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("mobilenetv2", (3, 224, 224), 1000, 3_504_872),
        ("alexnet", (3, 224, 224), 1000, 61_100_840),
        ("alexnet-bn", (3, 256, 256), 10, 61_100_840 - 990 * 4097 + ALEXNET_NORMS),
        # The CIFAR networks; He et al. give 0.46M for ResNet-32.
        ("resnet8", (3, 32, 32), 10, RESNET8),
        ("resnet32", (3, 32, 32), 10, RESNET32),
        ("resnet32", (3, 32, 32), 10, 464_154),
        ("resnet18", (3, 32, 32), 10, RESNET18),
        ("resnet34", (3, 32, 32), 100, 21_797_672 - 3 * 64 * (49 - 9) - 900 * 513),  # another stem, another head
        ("resnet50", (3, 32, 32), 100, 25_557_032 - 3 * 64 * (49 - 9) - 900 * 2049),
        ("mobilenetv2", (3, 32, 32), 100, 3_504_872 - 900 * 1281),  # only strides differ
        ("alexnet", (3, 32, 32), 10, 61_100_840 - 990 * 4097 - 3 * 64 * (121 - 9) - 256 * (36 - 16) * 4096),
        ("digits-cnn3", (3, 28, 28), 10, DIGITS3),
        ("digits-cnn6", (3, 28, 28), 10, DIGITS6),
    ],
)
def test_published_sizes(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert parameters(name, shape, classes) == expected


# ---- shapes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 8),
        (3, 9, 13),
        (3, 16, 16),
        (1, 28, 28),
        (3, 32, 32),
        (3, 64, 64),
        (3, 65, 80),
        (1, 96, 96),
        (3, 224, 224),
    ],
    ids=lambda s: "x".join(map(str, s)),
)
def test_every_size_of_image(name: str, shape: tuple[int, ...]) -> None:
    if name.startswith("digits") and max(shape) > 64:
        with pytest.raises(fs.InputError, match="4 to 64 pixels"):
            parameters(name, shape, 7)
        return
    with torch.device("meta"):  # shapes only: no numbers are computed
        model = models.MODELS[name][0](shape, 7)
        assert model(torch.empty(2, *shape)).shape == (2, 7)
    head = by_head(model, None)
    assert head is not None
    (last,) = head.modules
    assert isinstance(model.get_submodule(last), nn.Linear)
    assert model.get_submodule(last).out_features == 7
    assert last == [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]


@pytest.mark.parametrize(
    ("name", "side"),
    # Pixels left before the average or fc1: the strides of the published tables, and of the small variants.
    [("resnet18", {224: 7, 96: 3, 64: 8, 32: 4, 8: 1}), ("resnet8", {32: 8, 8: 2, 224: 56}),
     ("mobilenetv2", {224: 7, 96: 3, 64: 8, 32: 4, 8: 1}), ("alexnet", {224: 6, 96: 2, 64: 8, 32: 4, 8: 1})],
)  # fmt: skip
def test_resolution(name: str, side: dict[int, int]) -> None:
    last = {"resnet18": "layer4", "resnet8": "layer3", "mobilenetv2": "features", "alexnet": "pool"}[name]
    for pixels, left in side.items():
        seen: list[torch.Size] = []
        with torch.device("meta"):
            model = models.MODELS[name][0]((3, pixels, pixels), 5)
            model.get_submodule(last).register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.shape))
            model(torch.empty(2, 3, pixels, pixels))
        assert tuple(seen[-1][2:]) == (left, left)


def test_the_stem_for_large_images_quarters_them() -> None:
    for name in ("resnet18", "resnet50"):
        with torch.device("meta"):
            model = models.MODELS[name][0]((3, 224, 224), 5)
            assert model.maxpool(model.conv1(torch.empty(1, 3, 224, 224))).shape == (
                1,
                64,
                56,
                56,
            )  # the paper's Table 1


def test_alexnet_averages_as_the_adaptive_pool_does() -> None:
    for pixels, left in ((224, 6), (256, 7)):
        with torch.device("meta"):
            average = AlexNet((3, pixels, pixels), 2).average
        x = torch.randn(2, 3, left, left, dtype=torch.float64)
        assert torch.allclose(average(x), F.adaptive_avg_pool2d(x, 6), atol=1e-15)


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(fs.InputError, match=r"resnet18 on 4×4 images.*at least 8 pixels"):
        models.build("resnet18", (3, 4, 4), 2)
    with pytest.raises(fs.InputError, match="resnet50 on 4×40 images"):
        models.build("resnet50", (3, 4, 40), 2)
    with pytest.raises(fs.InputError, match=r"resnet32 on 2×2 images.*at least 4 pixels"):
        models.build("resnet32", (3, 2, 2), 2)
    for name in ("mobilenetv2", "alexnet", "alexnet-bn"):
        with pytest.raises(fs.InputError, match=f"{name} on 7×8 images.*at least 8 pixels"):
            models.build(name, (1, 7, 8), 2)
    with pytest.raises(fs.InputError, match="4 to 64 pixels"):
        models.build("digits-cnn6", (1, 96, 96), 2)
    for name in IMAGE_MODELS:
        with pytest.raises(fs.InputError, match="no images"):
            models.build(name, (60,), 2)


# ---- parts ------------------------------------------------------------------------------------------------------------
def test_shortcuts() -> None:
    def kinds(name: str) -> list[type[nn.Module]]:
        with torch.device("meta"):
            model = models.MODELS[name][0]((3, 32, 32), 2)
        return [type(m.downsample) for m in model.modules() if isinstance(m, Basic | Bottleneck)]

    same, zeros, project = nn.Identity, Zeros, nn.Sequential
    assert kinds("resnet8") == [same, project, project]
    assert kinds("resnet32") == [*[same] * 5, zeros, *[same] * 4, zeros, *[same] * 4]
    assert kinds("resnet18") == [same, same, project, same, project, same, project, same]
    assert kinds("resnet50")[:4] == [project, same, same, project]  # 64 → 256 channels at once


def test_zeros_take_every_second_pixel_and_put_a_channel_of_zeros_after_each() -> None:
    x = torch.randn(2, 3, 5, 6)
    out = Zeros(2, 2)(x)
    assert out.shape == (2, 6, 3, 3)
    assert torch.equal(out[:, ::2], x[:, :, ::2, ::2])
    assert not out[:, 1::2].any()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.77, 0.9, 1.0])
def test_zeros_keep_the_last_channels_last(p: float) -> None:
    for channels in (16, 32, 7):
        first = channels - math.floor(p * channels)  # of the last ⌊pC⌋
        x = torch.ones(1, channels, 1, 1)
        x[:, first:] = 2
        wide = Zeros(2, 1)(x).flatten()
        border = 2 * channels - math.floor(p * 2 * channels)
        assert (wide[:border] < 2).all()
        assert (wide[border:] != 1).all()


@pytest.mark.parametrize("block", [Basic(4, 4, 1, "zeros"), Basic(4, 8, 2, "zeros"), Bottleneck(16, 4, 1, "project")])
def test_a_block_whose_branch_is_zero_passes_its_shortcut(block: Basic | Bottleneck) -> None:
    last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
    nn.init.zeros_(last.weight)
    x = torch.randn(3, block.conv1.in_channels, 6, 6)
    assert torch.equal(block(x), block.downsample(x).relu())


def test_inverted_residuals_add_where_sizes_agree() -> None:
    for inputs, outputs, stride, adds in ((4, 4, 1, True), (4, 4, 2, False), (4, 5, 1, False)):
        block = InvertedResidual(inputs, outputs, stride, 6)
        nn.init.zeros_(block.conv[-1].weight)
        x = torch.randn(2, inputs, 6, 6)
        assert torch.equal(block(x), x) if adds else not block(x).any()
    with torch.device("meta"):
        model = models.MODELS["mobilenetv2"][0]((3, 32, 32), 2)
    blocks = [m for m in model.modules() if isinstance(m, InvertedResidual)]
    assert len(blocks) == 17
    assert sum(m.residual for m in blocks) == 10  # n − 1 of each stage: 1 + 2 + 3 + 2 + 2


def test_resnet_keeps_torchvisions_names() -> None:
    with torch.device("meta"):
        names = set(models.MODELS["resnet18"][0]((3, 224, 224), 1000).state_dict())

    def norm(name: str) -> set[str]:
        return {f"{name}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}

    expected = {"conv1.weight", "fc.weight", "fc.bias"} | norm("bn1")
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{stage}.{block}"
            expected |= {f"{at}.conv1.weight", f"{at}.conv2.weight"} | norm(f"{at}.bn1") | norm(f"{at}.bn2")
        if stage > 1:
            expected |= {f"layer{stage}.0.downsample.0.weight"} | norm(f"layer{stage}.0.downsample.1")
    assert names == expected


def test_convolutions_start_from_hes_normal() -> None:
    model = models.build("resnet18", (3, 32, 32), 2)
    for name, outputs in (("layer3.0.conv1", 256), ("layer4.0.conv1", 512)):  # twice as many outputs as inputs
        weight = model.get_submodule(name).weight
        std = math.sqrt(2 / (9 * outputs))
        assert weight.std().item() == pytest.approx(std, rel=0.01)
        assert (weight.abs() > 2 * std).double().mean().item() == pytest.approx(math.erfc(math.sqrt(2)), rel=0.05)


def test_other_widths_and_depths() -> None:
    model = ResNet((3, 16, 16), 4, Bottleneck, (1, 2), width=8, shortcut="zeros")
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 4)


# ---- the graph --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", models.MODELS)
def test_the_graph_can_be_followed(name: str) -> None:
    model = models.build(name, (1, 8, 8), 3).eval()
    graph = fx.symbolic_trace(model)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(graph(x), model(x))
    reached = {node.target for node in graph.graph.nodes if node.op == "call_module"}
    owners = {entry.rpartition(".")[0] for entry in model.state_dict()}
    assert owners <= reached  # every layer with weights is a node of its own
    assert not any(node.op == "get_attr" for node in graph.graph.nodes)


# ---- engines ----------------------------------------------------------------------------------------------------------
def federation(side: int) -> fs.Federation:
    g = np.random.default_rng(3)
    clients = [
        (g.normal(size=(n, 1, side, side)), np.arange(n) % 2, g.normal(size=(2, 1, side, side)), np.arange(2))
        for n in (4, 3)
    ]
    return fs.Federation.from_arrays(clients, classes=2)


class Inverted(nn.Module):
    """MobileNetV2's blocks, few and narrow: with and without expansion, shortcut and stride; dropout before the head."""

    head_modules = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            InvertedResidual(1, 4, 1, 1), InvertedResidual(4, 4, 1, 6), InvertedResidual(4, 6, 2, 6)
        )
        self.dropout, self.fc = nn.Dropout(0.2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.dropout(self.blocks(x).mean((2, 3))))


BUILT = {
    "resnet8": lambda: models.build("resnet8", (1, 8, 8), 2),
    "zeros": lambda: models.seeded(lambda: ResNet((1, 8, 8), 2, Basic, (1, 1), 4, "zeros"), 0),
    "bottleneck": lambda: models.seeded(lambda: ResNet((1, 8, 8), 2, Bottleneck, (1, 1), 4), 0),
    "pooled": lambda: models.seeded(lambda: ResNet((1, 72, 72), 2, Basic, (1,), 4), 0),
    "inverted": lambda: models.seeded(Inverted, 0),
    "mobilenetv2": lambda: models.build("mobilenetv2", (1, 16, 16), 2),
    "resnet18": lambda: models.build("resnet18", (1, 8, 8), 2),
}
SIDES = {"pooled": 72, "mobilenetv2": 16}  # at 8 pixels MobileNetV2's last norms see 3 numbers: rounding grows to 1e-8


@pytest.mark.parametrize("name", BUILT)
def test_stacked_equals_one(name: str) -> None:
    model = BUILT[name]().double()
    data = federation(SIDES.get(name, 8))
    settings = dict(rounds=1, epochs=1, batch_size=4, lr=0.05, momentum=0.9, dtype="float64", device="cpu", seed=1)
    one, stacked = (
        fs.simulate(fs.FedAvg(), model=model, data=data, engine=engine, **settings) for engine in ("one", "stacked")
    )
    assert distance(states(one), states(stacked)) < 1e-10
    start = model.state_dict()
    assert max((v - start[n]).abs().max().item() for n, v in one.generic().items()) > 1e-3, "nothing was trained"
