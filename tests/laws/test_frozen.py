"""Every method on a model of which a part is frozen, and on one with LoRA: the frozen part is nowhere but in the model."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fedstill as fs
from fedstill.core import tree
from fedstill.core.method import Phase
from fedstill.core.task import Upload

from ..problems import CLASSES, WIRED, distance, identical, make, ragged, run, states
from .table import ROWS, Row


class Attentive(nn.Module):
    """A transformer's layer over two tokens of two numbers, with position ids that never move."""

    head_modules = "head"

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.places, self.head = nn.Embedding(2, 4), nn.Linear(4, CLASSES)
        self.register_buffer("ids", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.up(x.reshape(-1, 2, 2)) + self.places(self.ids)
        return self.head(self.layer(tokens).mean(1))


def attentive() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Attentive().double()


def frozen(name: str) -> nn.Module:
    """A shared model whose first layers' weights do not train; BatchNorm's statistics move all the same."""
    model = make(name)
    for entry, parameter in model.named_parameters():
        parameter.requires_grad_(not entry.startswith(("fc1", "bn", "conv")))
    return model


LORA = "r=2,alpha=3,targets=up+self_attn+linear2"
EACH = list({type(row.method): row for row in reversed(ROWS)}.values())  # a row of every method
each_method = pytest.mark.parametrize("row", EACH, ids=lambda row: row.method.id)


def moving(result: fs.Run) -> set[str]:
    """All names of entries in what travels and is kept, but for the last part a flat list of names."""
    trees = [result.server, *(result.memory(k) for k in range(result.task.clients))]
    return {part for t in trees for name, _ in tree.leaves(t) for part in name.split(tree.SEPARATOR)}


@each_method
def test_lora_stacked_equals_one(row: Row) -> None:
    """In float64, for every method; the base model is in no tree. CD² alone refuses, in a line that says why."""
    settings = {"rounds": 2, "epochs": 1, "lora": LORA}
    if isinstance(row.method, fs.CD2PFed):
        with pytest.raises(fs.InputError, match="CD² cannot follow this one"):
            run(row.method, attentive(), **settings)
        return
    one, stacked = (run(row.method, attentive(), engine=engine, **settings) for engine in ("one", "stacked"))
    assert distance(states(one), states(stacked)) < 1e-10
    constants = set(one.task.net.constants)
    assert {"up.weight", "layer.self_attn.in_proj_weight", "layer.norm1.weight", "ids"} <= constants
    assert not constants & moving(one)
    for state in states(one).values():
        assert state.keys() == {*one.task.net.names, *constants}
        assert all(
            torch.equal(state[name], value) for name, value in attentive().state_dict().items() if name in constants
        )


@each_method
def test_a_frozen_body_stacked_equals_one(row: Row) -> None:
    name = "plain" if isinstance(row.method, fs.FedSALoRA | fs.FFALoRA) else "normed"
    settings = {"rounds": 2, "epochs": 1, **({} if name == "normed" else {"lora": "r=2,targets=fc1"})}
    one, stacked = (run(row.method, frozen(name), engine=engine, **settings) for engine in ("one", "stacked"))
    assert distance(states(one), states(stacked)) < 1e-10
    assert "fc1.weight" in one.task.net.constants
    assert not set(one.task.net.constants) & moving(one)
    assert ("bn.running_mean" in one.task.net.names) == (name == "normed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held(fs.FedAvg):
    """FedAvg whose phase leaves all but some entries alone: the slow way to freeze them."""

    def phases(self, task):
        still = {"fc1.weight", "fc1.bias", "bn.weight", "bn.bias"}
        return (Phase(moves=frozenset(task.net.names) - still),)


@pytest.mark.parametrize("how", [{"engine": "one"}, {"engine": "stacked"}, {"engine": "one", "workers": 2}], ids=str)
def test_freezing_gives_what_holding_still_gives(how: dict) -> None:
    """BatchNorm's statistics move in a frozen part, as in torch: in training mode, whatever becomes of weight and bias."""
    for name in ("plain", "normed"):
        ours, slow = run(fs.FedAvg(), frozen(name), **how), run(Held(), make(name))
        assert distance({"": ours.generic()}, {"": slow.generic()}) < 1e-14  # the slow way's mean of equals rounds
    assert not torch.equal(ours.generic()["bn.running_mean"], torch.zeros(6))


def test_a_traced_program_has_the_constants_as_inputs_once(traced) -> None:
    """On the device once, not in the rows of clients; the numbers are those of the engine `one`."""
    how = {"rounds": 1, "epochs": 1, "lora": LORA, "participation": 1.0}
    program = run(fs.FedAvg(), attentive(), engine="stacked", cohort=5, **how)
    assert distance(states(program), states(run(fs.FedAvg(), attentive(), **how))) < 1e-10
    (stage,) = program.trainer.engine.programs.stages.values()
    assert stage is not None
    constants = program.task.net.constants
    assert all(value is stage.source["constants"][name] for name, value in constants.items())
    assert not {part for name, _ in tree.leaves(stage.memory) for part in name.split("|")} & set(constants)


def test_adapters_begin_as_the_base_model() -> None:
    """B = 0: to the bit; where a weight asks for a gradient torch multiplies in another order, so to rounding there."""
    base, x = attentive(), torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    adapted = fs.with_lora(base, "r=3", "head", seed=1)
    for train in (True, False):  # in evaluation torch has a fast path, which reads the layers' weights itself
        assert (base.train(train)(x) - adapted.train(train)(x)).abs().max() < 1e-15
        with torch.no_grad():
            still = copy.deepcopy(base).requires_grad_(False)
            assert torch.equal(still(x), adapted(x))
    first = run(fs.FedAvg(), base, lora="r=3", lr=1e-300, rounds=1, epochs=1, participation=0.2)
    assert all(torch.equal(v, base.state_dict()[n]) for n, v in first.generic(merged=True).items())


# ---- which mean ----------------------------------------------------------------------------------------------------------
def products(method: fs.Method) -> tuple[Tensor, Tensor, Tensor]:
    """Of one merge of random uploads: B·A of the server afterwards, the product of the means, the mean of the products."""
    result = run(method, "plain", rounds=1, lora="r=2,targets=fc1")
    task, g = result.task, torch.Generator().manual_seed(0)
    server = result.server
    spread = [tree.map(lambda v: v + torch.randn(v.shape, generator=g, dtype=v.dtype), server["params"]) for _ in "123"]
    weights = (1.0, 2.0, 5.0)
    merged = method.merge(
        task, server, [Upload({"params": p}, w, k) for k, (p, w) in enumerate(zip(spread, weights, strict=True))]
    )
    whole = [{**task.net.constants, **p} for p in (merged["params"], *spread)]
    (a, b), rest = (whole[0]["fc1.lora_A"], whole[0]["fc1.lora_B"]), whole[1:]
    shares = [w / sum(weights) for w in weights]
    mean_a, mean_b = (sum(s * p[f"fc1.lora_{m}"] for s, p in zip(shares, rest, strict=True)) for m in "AB")
    mean = sum(s * p["fc1.lora_B"] @ p["fc1.lora_A"] for s, p in zip(shares, rest, strict=True))
    return b @ a, mean_b @ mean_a, mean


def test_the_mean_of_products_is_not_the_product_of_means() -> None:
    """FedAvg of adapters takes the product of the means; under FFA-LoRA's A, which is everybody's, the two are equal."""
    taken, product, mean = products(fs.FedAvg())
    assert (taken - product).abs().max() < 1e-14
    assert (product - mean).abs().max() > 0.1
    taken, product, mean = products(fs.FFALoRA())
    assert (taken - product).abs().max() < 1e-14
    assert (product - mean).abs().max() < 1e-14


def test_fedsa_takes_the_mean_of_a_under_each_clients_own_b() -> None:
    result = run(fs.FedSALoRA(), "plain", lora="r=2,targets=fc1", participation=1.0)
    personal = [result.personal(k) for k in range(5)]
    assert all(torch.equal(p["fc1.lora_A"], personal[0]["fc1.lora_A"]) for p in personal)
    assert all(
        not torch.equal(personal[i][n], personal[0][n]) for n in ("fc1.lora_B", "fc2.weight") for i in range(1, 5)
    )
    shared = run(fs.FedSALoRA(classifier="shared"), "plain", lora="r=2,targets=fc1", participation=1.0)
    assert torch.equal(shared.personal(0)["fc2.weight"], shared.personal(1)["fc2.weight"])


def test_ffa_is_fedavg_where_a_does_not_train() -> None:
    """Neutral: of a model that comes with a frozen A, FedAvg is FFA-LoRA, to the bit; so the seed's A is the one that it has."""
    adapted = fs.with_lora(make("plain"), "r=2,targets=fc1", "fc2", seed=2)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.endswith("lora_A"))
    ours = run(fs.FFALoRA(), "plain", lora="r=2,targets=fc1")  # of the seed 2
    assert identical(states(ours), states(run(fs.FedAvg(), adapted)))


@pytest.mark.parametrize("method", [fs.FedSALoRA(), fs.FFALoRA()], ids=lambda m: m.id)
def test_methods_of_adapters_refuse_a_model_without(method: fs.Method) -> None:
    with pytest.raises(fs.InputError, match=f"lora = '': should be set for {method.id}, for example r=8"):
        run(method, "plain", lora="")


def test_the_wire_and_another_order_of_means_change_nothing() -> None:
    """Robust rules, the gate's bound and DP-SGD work on the adapters alone."""
    plain = run(fs.FedAvg(), attentive(), lora=LORA, rounds=2)
    wired = run(fs.FedAvg(), attentive(), lora=LORA, rounds=2, transport=WIRED)
    assert identical(states(plain), states(wired))
    for settings in (
        {"average": "trimmed-mean", "suspected": 0.34, "participation": 1.0},
        {"max_norm": 0.01, "over_norm": "clip"},
        {"privacy": "local", "privacy_budget": 1e6, "noise_multiplier": 0.5, "epochs": 1},
    ):
        data = ragged(((13, 5), (7, 3), (6, 2), (10, 4), (5, 1)))
        ends = [
            run(fs.FFALoRA(), attentive(), data, engine=e, lora=LORA, rounds=2, **settings) for e in ("one", "stacked")
        ]
        assert distance(states(ends[0]), states(ends[1])) < 1e-10
        assert not any(record.get("rejected") for record in ends[0].history)
