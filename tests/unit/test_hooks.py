"""A mistake in a hook: one line that names the method, the hook and the remedy, in both engines."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fedstill as fs
from fedstill.core.errors import TrainingError
from fedstill.core.method import Phase

from ..problems import run


def method(name: str, *bases: type, **hooks) -> fs.Method:
    """A method of this name with other hooks."""
    return dataclass(frozen=True, kw_only=True)(type(name, bases or (fs.FedAvg,), hooks))()


def item(self, task, params, local, batch):
    loss = self.fit(task, params, batch)
    return loss if loss.item() > -1 else 2 * loss


def missing(self, task, params, local, batch):
    return self.fit(task, params, batch) + local["anchor"]["w"].sum()


def in_place(self, task, params, local, batch):
    params["fc2.bias"].add_(1)
    return self.fit(task, params, batch)


def on_local(self, task, params, local, batch):
    local["params"]["fc2.bias"].mul_(2)
    return self.fit(task, params, batch)


def detached(self, task, params, local, batch):
    return self.fit(task, params, batch).detach()


def many(self, task, params, local, batch):
    return task.logits(params, batch)


LOSSES = {  # the hook, what the message says, and the remedy
    "item": (item, "item", "torch.where"),
    "missing": (missing, "KeyError: 'anchor'", "Entries come from"),
    "in place": (in_place, "", ""),
    "on local": (on_local, "in place", "return"),
    "detached": (detached, "", "It should return one number"),
    "many": (many, "", "It should return one number"),
}
ENGINES = ("one", "stacked")


def failure(method: fs.Method, engine: str, **changes) -> str:
    with pytest.raises(TrainingError) as caught:
        run(method, "plain", engine=engine, rounds=1, workers=1, **changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name: str, engine: str) -> None:
    hook, said, remedy = LOSSES[name]
    if name == "item" and engine == "one":
        run(method("Broken", loss=hook), "plain", engine="one", rounds=1)  # one client's number may be read
        return
    if name == "detached" and engine == "stacked":
        return  # torch.func gives a gradient of zeros
    text = failure(method("Broken", loss=hook), engine)
    assert text.startswith(("Broken.loss()", "Broken." + hook.__name__ + "()"))
    assert said in text
    assert remedy in text


def begun(self, task, down, memory):
    return {"model": down["params"]}


def unpacked(self, task, down, memory, local):
    return local


def overwriting(self, task, down, memory):
    down["params"]["fc1.bias"].zero_()
    return {"params": down["params"]}


def forgetting(self, task, local, grads):
    return {}


def finishing(self, task, down, memory, local):
    return {"params": local["weights"]}, {}


def epochs(self, task):
    return (Phase(after_epoch=lambda task, before, now: {n: now[n] - before["none"] for n in now}),)


HOOKS = {
    "begin": (begun, "'params'"),
    "begin ": (overwriting, "in place"),
    "finish": (unpacked, "(upload, memory)"),
    "finish ": (finishing, "KeyError: 'weights'"),
    "correct": (forgetting, "KeyError"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HOOKS)
def test_other_hooks(name: str, engine: str) -> None:
    hook, said = HOOKS[name]
    text = failure(method("Broken", **{name.strip(): hook}), engine)
    assert text.startswith(f"Broken.{name.strip()}()")
    assert said in text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_phases_own_functions(engine: str) -> None:
    text = failure(method("Broken", phases=epochs), engine)
    assert "(after_epoch of phase 1)" in text
    assert "test_hooks.py:" in text
    assert "KeyError: 'none'" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_step(engine: str) -> None:
    text = failure(method("Broken", step=lambda self, task, local, batch: local["v"]), engine)
    assert text.startswith("Broken.step()")
    assert "KeyError: 'v'" in text


class Ours(Exception):
    """An error that a method raises on purpose."""


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_of_a_methods_own_kind_stays_as_it_is(engine: str) -> None:
    def refuse(self, task, down, memory, local):
        raise Ours("not here")

    with pytest.raises(Ours, match="not here"):
        run(method("Refusing", finish=refuse), "plain", engine=engine, rounds=1, workers=1)


def test_what_is_no_hook_s_fault_stays_as_it_is(monkeypatch) -> None:
    from fedstill.engine import one

    def broken(*given) -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(one, "_batches", broken)
    with pytest.raises(LookupError, match="a fault of ours"):
        run(fs.FedAvg(), "plain", rounds=1, workers=1)


class Branches(torch.nn.Module):
    """It looks at the numbers to choose its way, which `vmap` cannot follow."""

    head_modules = "out"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)

    def forward(self, x):
        h = self.body(x)
        return self.out(h) if bool(x.sum() < 1e9) else self.out(-h)


def test_a_model_that_cannot_be_stacked() -> None:
    with pytest.raises(fs.InputError, match="engine = 'stacked': should be 'one' for this model: ") as caught:
        run(fs.FedAvg(), Branches().double(), engine="stacked")
    assert "\n" not in str(caught.value)


def test_auto_does_not_stack_it() -> None:
    from ..problems import ragged

    data = ragged(((6, 2),) * 12)
    for participation in (0.5, 1.0):  # 6 clients, and 12, from 10 of which on stacking pays
        found = run(fs.FedAvg(), Branches().double(), data, engine="auto", participation=participation, rounds=1)
        assert found.engine == "one"
