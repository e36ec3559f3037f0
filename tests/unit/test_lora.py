"""LoRA: what is adapted and how it is written down, layer by layer, and adapters that leave a run, peft's among them."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedstill as fs
from fedstill.cli import main
from fedstill.nn import lora, peft_format
from fedstill.nn.lora import Lora

from ..laws.test_frozen import attentive
from ..problems import make, ragged, run

F64 = torch.float64


class Conv1D(nn.Module):
    """A linear layer kept transposed, as transformers' GPT-2 has them."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Doubled(nn.Linear):
    """A linear layer with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


# ---- the settings --------------------------------------------------------------------------------------------------------
def test_a_text_describes_it() -> None:
    spec = Lora.parse("r=4,alpha=32,targets=query+value,dropout=0.1,head=freeze,scaling=rs")
    assert spec == Lora(r=4, alpha=32.0, targets=("query", "value"), dropout=0.1, head="freeze", scaling="rs")
    assert (Lora(r=4, alpha=32).scale, spec.scale) == (8.0, 16.0)
    assert Lora.parse("r=2").targets == ("all-linear",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8", "lora = '8': should be of the form r=8,alpha=16,targets=query"),
        ("r=8,r=9", "should be of the form"),
        ("rank=8", "lora = 'rank=8': should be of the form"),
        ("r=two", "lora = 'r=two': should be a number"),
        ("r=0", "lora r = 0: should be a whole number at least 1"),
        ("head=both", "lora head = 'both': should be"),
        ("targets=quary", "lora = 'quary': should be a linear layer or attention of the model: "),
        ("targets=fc2", "lora = 'fc2': should be outside of the head"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(text: str, says: str) -> None:
    with pytest.raises(fs.InputError, match=says):
        run(fs.FedAvg(), "plain", lora=text)


def test_a_model_without_a_known_head_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    with pytest.raises(fs.InputError, match="head = \\(none\\): should be named, since LoRA trains it"):
        run(fs.FedAvg(), model, lora="r=2")
    with pytest.raises(fs.InputError, match="a model without adapters: this one has some"):
        run(fs.FedAvg(), fs.with_lora(make("plain"), "r=2", "fc2"), lora="r=2")


TARGETS = {
    "all-linear": {"up", "layer.self_attn", "layer.self_attn.out_proj", "layer.linear1", "layer.linear2"},
    "linear1": {"layer.linear1"},
    "layer.linear1+up": {"layer.linear1", "up"},
    "layer.linear?": {"layer.linear1", "layer.linear2"},
    "self_attn": {"layer.self_attn", "layer.self_attn.out_proj"},
}


@pytest.mark.parametrize("targets", TARGETS)
def test_targets_are_names_ends_of_names_and_patterns(targets: str) -> None:
    adapted = fs.with_lora(attentive(), f"r=2,targets={targets}", "head")
    assert {name for name, _ in lora.adapters(adapted)} == TARGETS[targets]
    trains = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trains == {f"{name}.lora_{m}" for name in TARGETS[targets] for m in "AB"} | {"head.weight", "head.bias"}


def test_a_is_kaiming_uniform_from_the_seed_and_b_is_zero() -> None:
    wide = nn.Sequential(nn.Linear(400, 60), nn.ReLU(), nn.Linear(60, 3))
    one, same, other = (fs.with_lora(wide, "r=50", "2", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one.lora_A, same.lora_A)
    assert not torch.equal(one.lora_A, other.lora_A)
    bound = 1 / math.sqrt(400)
    assert 0.99 * bound < one.lora_A.abs().max() <= bound
    assert one.lora_A.var().item() == pytest.approx(bound**2 / 3, rel=0.05)
    assert not one.lora_B.any()
    assert torch.equal(wide[0].weight, one._parameters["weight"])


# ---- layers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 6), nn.Linear(4, 6, bias=False), Conv1D(6, 4), Doubled(4, 6)], ids=lambda v: type(v).__name__
)
def test_an_adapted_layer_is_the_layer_of_the_merged_weight(layer: nn.Module) -> None:
    """Whoever reads `weight`, and the forward pass, whatever its class; W₀ stays as it was under its own name."""
    base = nn.Sequential(copy.deepcopy(layer), nn.Linear(6, 3)).double()
    adapted = fs.with_lora(base, "r=2,alpha=3", "1")
    g, x = torch.Generator().manual_seed(0), torch.randn(2, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    a, b = (torch.randn(shape, dtype=F64, generator=g) for shape in ((2, 4), (6, 2)))
    with torch.no_grad():
        adapted[0].lora_A.copy_(a)
        adapted[0].lora_B.copy_(b)
    product = 1.5 * b @ a
    by_hand = base[0].weight + (product.T if isinstance(layer, Conv1D) else product)
    plain = copy.deepcopy(base)
    plain[0].weight.data = by_hand.detach()
    assert (adapted(x) - plain(x)).abs().max() < 1e-14
    assert (adapted[0].weight - by_hand).abs().max() < 1e-14
    assert torch.equal(adapted.state_dict()["0.weight"], base[0].weight)
    assert torch.equal(lora.merged(adapted, adapted.state_dict())["0.weight"], adapted[0].weight)
    assert type(lora.removed(adapted)[0]) is type(layer)
    assert lora.removed(adapted).state_dict().keys() == base.state_dict().keys()


def test_dropout_of_adapters_is_keyed_and_off_in_evaluation() -> None:
    """Same bits whatever torch's generator says; stacked as one by one."""
    ends = []
    for seed, engine in ((1, "one"), (2, "one"), (1, "stacked")):
        torch.manual_seed(seed)
        ends.append(run(fs.FedAvg(), "plain", lora="r=2,dropout=0.5", rounds=2, engine=engine).generic())
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
    assert max((ends[0][n] - ends[2][n]).abs().max() for n in ends[0]) < 1e-10
    without = run(fs.FedAvg(), "plain", lora="r=2", rounds=2).generic()
    assert not torch.equal(ends[0]["fc1.lora_B"], without["fc1.lora_B"])


# ---- adapters that leave a run -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    words = (
        "run pfedsd --lora r=2,alpha=3 --data digits --clients 3 --partition iid --rounds 2 --epochs 1 --batch-size 200"
    )
    assert main([*words.split(), "--device", "cpu", "--workers", "1", "--out", str(out)]) == 0
    return out


def test_export_writes_whole_merged_and_adapters_alone(folder: Path, tmp_path: Path, capsys) -> None:
    given = fs.load(folder)
    for words, keys in (
        (["--to", tmp_path / "whole.safetensors"], given.personal(1).keys()),
        (["--to", tmp_path / "merged.safetensors", "--merge"], {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}),
        (["--to", tmp_path / "adapter"], None),
    ):
        capsys.readouterr()
        assert main(["export", str(folder), "--client", "1", *map(str, words)]) == 0
        assert "loaded again: same predictions" in capsys.readouterr().out
        if keys is not None:
            assert load_file(words[1]).keys() == keys
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["modules_to_save"]) == (
        "LORA",
        2,
        3.0,
        ["fc2"],
    )
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = given.personal(1)
    names = {f"fc1.lora_{m}.weight": f"fc1.lora_{m}" for m in "AB"} | {n: n for n in ("fc2.weight", "fc2.bias")}
    assert tensors.keys() == {f"base_model.model.{name}" for name in names}
    assert all(torch.equal(tensors[f"base_model.model.{name}"], own[source]) for name, source in names.items())
    assert main(["export", str(folder), "--client", "1", "--to", str(tmp_path / "adapter")]) == 2
    assert "a file that does not exist yet" in capsys.readouterr().err


def test_a_model_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    result = run(fs.FedAvg(), "plain", rounds=1)
    for arguments, says in (
        ((tmp_path / "adapter",), "the model has no adapters"),
        ((tmp_path / "a.pt2", None, True), "merge = True"),
    ):
        with pytest.raises(fs.InputError, match=says):
            fs.export(result, *arguments)


def library(name: str) -> Any:
    """Import peft or transformers, or skip the test; a torchvision that has no build for this torch is kept out of their way."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    return pytest.importorskip(name)


def test_peft_reads_the_adapters(tmp_path: Path) -> None:
    """The library itself, on a transformer: every tensor finds its place, and linear layers and head give our numbers.

    Not asked: the output with torch's own attention, whose out_proj peft 0.21 merges twice.
    """
    peft = library("peft")
    x = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    for targets, layers in (("all-linear", 5), ("up+linear1+linear2", 3)):
        result = run(fs.PFedSD(), attentive(), ragged(), rounds=2, lora=f"r=2,alpha=3,targets={targets}")
        fs.export(result, tmp_path / str(layers), 1)
        model = peft.PeftModel.from_pretrained(attentive(), str(tmp_path / str(layers)))
        theirs, ours = (
            peft.get_peft_model_state_dict(model),
            load_file(tmp_path / str(layers) / "adapter_model.safetensors"),
        )
        assert len(ours) == 2 * layers + 2
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    model.train()  # there is no dropout; in evaluation torch's fast path would read weights past peft's own layers
    with torch.no_grad():
        expected = result.task.predict(result.served(1), x)
        assert (model(x) - expected).abs().max() < 1e-14
        assert (attentive()(x) - expected).abs().max() > 1e-2


def test_hugging_face_bert_and_its_adapters(tmp_path: Path) -> None:
    """transformers' BERT at a tiny size with random weights: query and value adapted, read back by peft."""
    peft, transformers = library("peft"), library("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bert = transformers.BertForSequenceClassification(config)
    adapted = fs.with_lora(bert, "r=2,targets=query+value", "classifier", seed=3)
    names = [name for name, _ in lora.adapters(adapted)]
    assert names == [f"bert.encoder.layer.0.attention.self.{n}" for n in ("query", "value")]
    with torch.no_grad():
        for _, layer in lora.adapters(adapted):
            layer.lora_B.normal_(generator=torch.Generator().manual_seed(1))
    trains = [name for name, p in adapted.named_parameters() if p.requires_grad]
    files = peft_format.files_of(adapted, adapted.state_dict(), trains, ["classifier"], "bert", {"format": "pt"})
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    ids = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(bert), str(tmp_path)).eval()
    with torch.no_grad():
        assert (loaded(ids).logits - adapted.eval()(ids).logits).abs().max() < 1e-6
        assert (bert.eval()(ids).logits - adapted(ids).logits).abs().max() > 1e-3
