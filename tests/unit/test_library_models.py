"""Models of timm and transformers by name, their heads, arguments, weights from a file; and pFedSD with them by command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedstill as fs
from fedstill import models
from fedstill.cli import main
from fedstill.core.errors import InputError
from fedstill.models import beside_torchvision, weights
from fedstill.models.arguments import parse
from fedstill.nn.split import by_head
from fedstill.run.export import export

from ..problems import SETTINGS, distance, states

WORDS = "vocab_size=12,hidden_size=8,num_attention_heads=2,intermediate_size=8"
VIT = "depth=1,embed_dim=12,num_heads=2,patch_size=8,drop_path_rate=0.1,proj_drop_rate=0.1,attn_drop_rate=0.1"
SMALL = {  # what trains by command: the model, its arguments, and the data
    "timm:vit_tiny_patch16_224": (VIT, "images"),
    "timm:test_convnext": ("drop_path_rate=0.2,dims=[8,8,8,8]", "images"),
    "timm:test_efficientnet": ("drop_path_rate=0.2,drop_rate=0.1", "images"),
    "hf:bert-tiny": (WORDS, "ids"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder, g = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    y = g.integers(0, 2, 20)
    np.savez(folder / "images.npz", x=g.integers(0, 256, (20, 3, 32, 32)).astype(np.uint8), y=y)
    np.savez(folder / "ids.npz", x=g.integers(0, 12, (20, 6)), y=y)
    return folder


@pytest.mark.parametrize("model", SMALL)
def test_pfedsd_by_command(model: str, files: Path, capsys) -> None:
    arguments, data = SMALL[model]
    words = ["run", "pfedsd", "--data", str(files / f"{data}.npz"), "--model", model, "--model-args", arguments]
    words += [
        "--clients",
        "2",
        "--partition",
        "iid",
        "--rounds",
        "2",
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--lr",
        "0.01",
    ]
    assert main([*words, "--engine", "stacked", "--no-out"]) == 0
    assert f"model {model}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "given", "shape", "head"),
    [
        ("timm:test_vit", "", (1, 16, 16), "head"),  # fitted to size and channels
        ("timm:test_convnext", "", (3, 32, 32), "head.fc"),
        ("timm:test_efficientnet", "", (3, 32, 32), "classifier"),
        ("hf:bert", f"{WORDS},num_hidden_layers=1", (6,), "classifier"),
        ("hf:roberta", f"{WORDS},num_hidden_layers=1", (6,), "classifier"),
        ("hf:gpt2", "vocab_size=12,n_embd=8,n_head=2,n_layer=1,pad=0", (6,), "score"),
        (
            "hf:vit",
            "hidden_size=8,num_attention_heads=2,intermediate_size=8,num_hidden_layers=1",
            (3, 32, 32),
            "classifier",
        ),
    ],
)
def test_models_fit_the_data_and_name_their_head(name: str, given: str, shape: tuple[int, ...], head: str) -> None:
    model, again = (models.build(name, shape, 4, 3, given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    split = by_head(model, None)
    assert split is not None
    assert split.modules == (head,)
    x = torch.ones((2, *shape), dtype=torch.int64 if len(shape) == 1 else torch.float32)
    out = model.eval()(x)
    assert (out if isinstance(out, torch.Tensor) else out.logits).shape == (2, 4)


def test_heads_by_the_customs_of_torchvision() -> None:
    body = ("features", nn.Linear(4, 4))

    def named(*layers: tuple[str, nn.Module]) -> object:
        split = by_head(nn.Sequential(dict_of(layers)), None)
        return split and split.modules

    def dict_of(layers):
        from collections import OrderedDict

        return OrderedDict(layers)

    assert named(body, ("classifier", nn.Sequential(nn.ReLU(), nn.Linear(4, 3)))) == ("classifier",)
    assert named(body, ("fc", nn.Linear(4, 3)), ("out", nn.ReLU())) == ("fc",)  # the last with parameters
    assert named(body, ("heads", nn.Linear(4, 3))) == ("heads",)
    assert named(("fc", nn.Linear(4, 4)), ("last", nn.Linear(4, 3))) is None  # called so, but not the last
    assert named(("fc", nn.Linear(4, 3))) is None  # the whole model


def test_padding_is_not_attended_to() -> None:
    """Longer sequences that end in padding have the same logits; without `pad` they have others."""
    for name, more in (
        ("hf:bert", "num_hidden_layers=1"),
        ("hf:distilbert", "dim=8,n_heads=2,hidden_dim=8,n_layers=1"),
    ):
        given = f"{WORDS},{more}" if name == "hf:bert" else f"vocab_size=12,{more}"
        masked, plain = (models.build(name, (6,), 3, 0, given + pad).eval() for pad in (",pad=0", ""))
        short = torch.tensor([[3, 5, 7, 2]])
        long = torch.tensor([[3, 5, 7, 2, 0, 0]])
        assert torch.allclose(masked(long).logits, plain(short).logits, atol=1e-6)
        assert not torch.allclose(plain(long).logits, plain(short).logits, atol=1e-6)


@pytest.mark.parametrize("name", ["hf:bert", "hf:gpt2"])
def test_models_of_padded_tokens_are_stacked(name: str) -> None:
    g = np.random.default_rng(0)
    sites = [(g.integers(0, 12, (n, 5)), g.integers(0, 3, n)) * 2 for n in (5, 3)]
    given = (
        f"{WORDS},num_hidden_layers=1,pad=0" if name == "hf:bert" else "vocab_size=12,n_embd=8,n_head=2,n_layer=1,pad=0"
    )
    model, data = models.build(name, (5,), 3, 0, given), fs.Federation.from_arrays(sites, classes=3)
    settings = {**SETTINGS, "rounds": 1, "epochs": 1}
    one, stacked = (fs.simulate(fs.PFedSD(), model=model, data=data, **settings, engine=e) for e in ("one", "stacked"))
    assert distance(states(one), states(stacked)) < 1e-10


def test_a_folder_of_transformers_with_weights_and_without(tmp_path: Path, capsys) -> None:
    model = models.build("hf:bert", (6,), 3, 7, f"{WORDS},num_hidden_layers=1")
    model.save_pretrained(tmp_path / "whole")
    capsys.readouterr()
    again = models.build(f"hf:{tmp_path / 'whole'}", (6,), 3, 0)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in again.state_dict().items())
    assert capsys.readouterr().err == ""
    other = models.build(f"hf:{tmp_path / 'whole'}", (6,), 5, 0)  # another number of classes: the head starts anew
    assert other.classifier.weight.shape == (5, 8)
    assert torch.equal(other.bert.pooler.dense.weight, model.bert.pooler.dense.weight)
    assert "classifier.bias, classifier.weight start anew" in capsys.readouterr().err
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    bare = models.build(f"hf:{tmp_path / 'bare'}", (6,), 3, 7)
    assert bare.bert.pooler.dense.weight.shape == (8, 8)
    assert models.settled(f"hf:{tmp_path / 'bare'}") == f"hf:{(tmp_path / 'bare').absolute()}"
    (tmp_path / "bare" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"a .bin is a pickle"):
        models.build(f"hf:{tmp_path / 'bare'}", (6,), 3)


@pytest.mark.parametrize(
    ("name", "given", "shape", "says"),
    [
        ("timm:vit_tiny", "", (3, 32, 32), "a model of timm"),
        ("timm:test_vit", "", (6,), "it takes images"),
        ("timm:test_vit", "pretrained=true", (3, 32, 32), "pretrained.*--weights FILE.safetensors"),
        ("timm:test_vit", "nothing=1", (3, 32, 32), "can be made for images of 3×32×32.*nothing"),
        ("hf:nothing", "", (6,), "bert-tiny, a type that transformers knows"),
        ("hf:bert-tiny", "deep=3", (6,), "model_args = 'deep': should be a field of BertConfig, or pad"),
        ("hf:bert-tiny", "pad=x", (6,), "the id of the token"),
        ("hf:bert-tiny", "", (600,), "at most 512, as max_position_embeddings says"),
        ("hf:bert-tiny", "", (3, 32, 32), "a model that classifies samples of shape 3×32×32"),
        ("hf:vit", "", (6,), "a model that classifies samples of shape 6"),
        ("mlp", "deep=3", (6,), "mlp takes none"),
        ("mlq", "", (6,), "'mlr'.*timm:NAME, hf:NAME"),
        ("hf:bert-tiny", "a", (6,), "name=value"),
        ("hf:bert-tiny", "a=1,a=2", (6,), "name=value"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(name: str, given: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        models.build(name, shape, 3, 0, given)
    assert "\n" not in str(error.value)


def test_without_the_extra_a_line_says_what_to_install(monkeypatch) -> None:
    for name, extra in (("timm", "vision"), ("transformers", "hf")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(InputError, match=rf"pip install 'fedstill\[{extra}\]'"):
            models.build({"timm": "timm:test_vit", "transformers": "hf:bert-tiny"}[name], (6,), 3)


def test_torchvision_is_imported_without_its_operators() -> None:
    beside_torchvision.import_torchvision()
    from torchvision.ops import StochasticDepth

    out = StochasticDepth(0.5, "row").train()(torch.ones(8, 2))
    assert out.shape == (8, 2)


def test_arguments_are_read() -> None:
    assert parse("") == {}
    assert parse("a=(1, 2),b=x=y,c=-1e-3,d=None") == {"a": (1, 2), "b": "x=y", "c": -1e-3, "d": None}


@pytest.mark.parametrize("suffix", ["safetensors", "pt2"])
def test_a_model_of_transformers_is_exported(suffix: str, trained_bert: fs.Run, tmp_path: Path) -> None:
    """Its output is no tensor, and its positions are a buffer outside of the state."""
    assert export(trained_bert, tmp_path / f"model.{suffix}", 0).difference < 1e-6


def bert_run(**changes) -> fs.Run:
    g = np.random.default_rng(0)
    sites = [(g.integers(0, 12, (n, 5)), g.integers(0, 3, n)) * 2 for n in (5, 3)]
    model = models.build("hf:bert", (5,), 3, 0, f"{WORDS},num_hidden_layers=1,initializer_range=0.5,pad=0")
    data = fs.Federation.from_arrays(sites, classes=3)
    return fs.simulate(fs.FedAvg(), model=model, data=data, rounds=1, epochs=1, **changes)


@pytest.fixture(scope="module")
def trained_bert() -> fs.Run:
    return bert_run()


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_bfloat16_products_of_a_transformer(engine: str, trained_bert: fs.Run) -> None:
    """Where a mask has made attention's weights float32, its values are bfloat16."""
    assert bert_run(precision="bf16", engine=engine).history[0]["loss"] == pytest.approx(
        trained_bert.history[0]["loss"], rel=0.02
    )


# ---- weights from a file -------------------------------------------------------------------------------------------------------
def net(wide: int = 4, classes: int = 3) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(wide, 4), nn.Linear(4, classes)

    return Net()


def test_weights_are_loaded_and_a_head_of_another_size_starts_anew(tmp_path: Path, capsys) -> None:
    source, file = net(), str(tmp_path / "w.safetensors")
    save_file(source.state_dict(), file)
    same, other = net(), net(classes=5)
    weights.load(same, file, by_head(same, None))
    assert all(torch.equal(v, source.state_dict()[n]) for n, v in same.state_dict().items())
    assert capsys.readouterr().err == ""
    before = other.head.weight.clone()
    weights.load(other, file, by_head(other, None))
    assert torch.equal(other.body.weight, source.body.weight)
    assert torch.equal(other.head.weight, before)
    assert "head.bias, head.weight start anew" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    file, state = tmp_path / "w.safetensors", net().state_dict()

    def refused(says: str, entries: dict, model: nn.Module) -> None:
        save_file(entries, file)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(InputError, match=says) as error:
            weights.load(model, str(file), by_head(model, None))
        assert error.value.field == "weights"
        assert all(map(torch.equal, before, model.parameters()))

    refused("it has no body.bias", {n: v for n, v in state.items() if n != "body.bias"}, net())
    refused(r"another size of body.weight \(4×4, the model 4×6\)", state, net(wide=6))
    refused("and the model has not, more", {**state, "more": torch.ones(1)}, net())
    file.write_bytes(b"not tensors")
    with pytest.raises(InputError, match="a safetensors file"):
        weights.load(net(), str(file), None)
    for name, says in (("w.bin", "ends in .safetensors"), (str(tmp_path / "no.safetensors"), "there is no")):
        with pytest.raises(InputError, match=says):
            weights.settled(name)


def test_a_run_starts_from_weights_and_goes_on_from_the_same_alone(tmp_path: Path, capsys) -> None:
    start = models.build("mlr", (1, 8, 8), 10, 5)
    file = tmp_path / "w.safetensors"
    save_file(start.state_dict(), file)
    words = [
        "run",
        "fedavg",
        "--model",
        "mlr",
        "--weights",
        str(file),
        "--rounds",
        "1",
        "--lr",
        "1e-30",
        "--clients",
        "3",
    ]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    state = fs.load(tmp_path / "a").generic()
    assert all(torch.allclose(v, start.state_dict()[n], atol=1e-7) for n, v in state.items())
    assert f"{file}@" in (tmp_path / "a" / "experiment.toml").read_text()
    save_file({n: v + 1 for n, v in start.state_dict().items()}, file)
    assert main(["resume", str(tmp_path / "a"), "--rounds", "2"]) == 2
    assert "it has changed since" in capsys.readouterr().err


def test_a_config_file_is_data_and_nothing_else(tmp_path: Path) -> None:
    """No code of a folder is run, whatever its configuration asks for."""
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')\n")
    fields = {
        "model_type": "bert",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.M"},
    }
    config = json.dumps({**fields, "vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
    (tmp_path / "config.json").write_text(config)
    assert type(models.build(f"hf:{tmp_path}", (4,), 3)).__name__ == "BertForSequenceClassification"
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"a config\.json that is"):
        models.build(f"hf:{tmp_path}", (4,), 3)
