"""Five kinds of mistakes in hooks, each named with the hook and the remedy before any work, whatever the engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import fedstill as fs
from fedstill.cli import main
from fedstill.core import contract, own, tree
from fedstill.core.errors import HookError
from fedstill.core.method import Method
from fedstill.engine import rehearsal
from fedstill.methods import METHODS

from ..problems import identical, make, ragged, run, states

ENGINES = ("one", "stacked", "auto")


def made(_name: str = "Broken", *bases: type, **hooks) -> fs.Method:
    """A method with other hooks."""
    return dataclass(frozen=True, kw_only=True)(type(_name, bases or (fs.FedAvg,), hooks))()


def refusal(method: fs.Method, engine: str, model: str = "plain", **changes) -> str:
    """The line in which a run of the method is refused, before its first round."""
    rounds: list[dict] = []
    with pytest.raises(HookError) as caught:
        fs.simulate(
            method, model=make(model), data=ragged(), engine=engine, rounds=1, dtype="float64", progress=rounds.append,
            **changes,
        )  # fmt: skip
    assert rounds == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- (a) a misspelt hook, a wrong signature ----------------------------------------------------------------------------------
MISSPELT = {  # as many arguments as the hook
    "begn": ("begin", lambda self, task, down, memory: None),
    "losss": ("loss", lambda self, task, params, local, batch: None),
    "Loss": ("loss", lambda self, task, params, local, batch: None),
    "finsh": ("finish", lambda self, task, down, memory, local: None),
    "initClient": ("init_client", lambda self, task, params: None),
    "persnal": ("personal", lambda self, task, down, memory: None),
    "stpe": ("step", lambda self, task, local, batch: None),
    "corect": ("correct", lambda self, task, local, grads: None),
    "mergee": ("merge", lambda self, task, server, uploads: None),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_hook_is_found_when_the_class_is_defined(name: str) -> None:
    hook, function = MISSPELT[name]
    with pytest.raises(HookError, match=rf"Broken\.{name}\(\) is no hook.*Did you mean {hook}\(task") as caught:
        type("Broken", (fs.FedAvg,), {name: function})
    assert f"_{name}()" in str(caught.value)


HELPERS = {
    "_losss": lambda self, task, params, local, batch: None,  # an underscore
    "distance": lambda self, task, params, local, batch: None,  # resembles nothing
    "merged": lambda self, tree: None,  # other arguments
    "hold_generic": lambda self, task, server: None,
    "teacher_loss": lambda self, task, params, local, batch: None,
    "Step": dataclass(type("Step", (), {})),  # a class, not a function
    **{
        name: lambda self, task, params, local, batch: None
        for name in ("kd_loss", "my_loss", "loss2", "loss_fn", "lossA")
    },
    "recheck": lambda self, task: None,
    "phase": lambda self, task: None,
    "refinish": lambda self, task, down, memory, local: None,
    "mergedd": lambda self, task, server, uploads: None,
    "fit2": lambda self, task, params, batch: None,
    "fid": lambda self, task, params, batch: None,
    "end": lambda self, a, b, c: None,
    "pest": lambda self, a, b, c: None,
    "stop": lambda self, task, local, batch: None,
}


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_are_left_alone(name: str) -> None:
    assert hasattr(type("Fine", (fs.FedAvg,), {name: HELPERS[name]}), name)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_loss_of_a_phase_may_have_any_name(engine: str) -> None:
    class TwoLosses(fs.FedAvg):
        def phases(self, task):
            return (fs.Phase(), fs.Phase(loss=self.kd_loss))

        def kd_loss(self, task, params, local, batch):
            return 2 * self.fit(task, params, batch)

    assert run(TwoLosses(), engine=engine, rounds=1).history


def test_a_hook_may_take_names_that_are_never_given() -> None:
    class Fine(fs.FedAvg):
        def finish(self, task, *rest, local=None):
            return super().finish(task, *rest)

    assert run(Fine(), engine="one", rounds=1).history


def test_every_method_that_comes_with_fedstill_is_left_alone() -> None:
    for kind in METHODS.values():
        contract.check_class(kind, Method)
        contract.check_decorated(kind, Method)


SIGNATURES = {
    "too few": ("loss", lambda self, task, params, batch: None, "cannot be called as a hook"),
    "too many": ("begin", lambda self, task, down, memory, round: None, "missing a required argument: 'round'"),
    "without self": ("finish", lambda task, down, memory, local: None, "cannot be called as a hook"),
    "in another order": ("loss", lambda self, task, local, params, batch: None, "names 'local' in another place"),
}


@pytest.mark.parametrize("case", SIGNATURES)
def test_a_wrong_signature(case: str) -> None:
    hook, function, says = SIGNATURES[case]
    with pytest.raises(HookError, match=rf"Broken\.{hook}\(") as caught:
        type("Broken", (fs.FedAvg,), {hook: function})
    assert says in str(caught.value)
    assert f"It should be {hook}(self, task, " in str(caught.value)


def test_signatures_that_can_be_called_are_left_alone() -> None:
    class Fine(fs.FedAvg):
        def loss(self, *given: object) -> None:
            return None

        def begin(self, t, d, m, extra: int = 3) -> None:
            return None

        @staticmethod
        def finish(task, down, memory, local) -> None:
            return None

    assert Fine.id == "fedavg"


def test_a_misspelt_flag_of_the_class() -> None:
    with pytest.raises(HookError, match=r"Broken\.need_head is not known. Did you mean needs_head\?"):
        type("Broken", (fs.FedAvg,), {"need_head": True})
    assert type("Fine", (fs.FedAvg,), {"layers": 3}).layers == 3


def test_a_hook_that_is_a_coroutine() -> None:
    async def send(self, task, server, client):
        return {}

    with pytest.raises(HookError, match=r"Broken\.send\(\) is a coroutine"):
        type("Broken", (fs.FedAvg,), {"send": send})


# ---- (b) a change in place ---------------------------------------------------------------------------------------------------
def on_params(self, task, params, local, batch):
    with torch.no_grad():
        params["fc2.bias"].data.add_(1)  # neither autograd nor a version counter sees it
    return self.fit(task, params, batch)


def on_local(self, task, params, local, batch):
    local["params"]["fc2.bias"].mul_(2)
    return self.fit(task, params, batch)


def on_down(self, task, down, memory):
    down["params"]["fc1.bias"].zero_()
    return {"params": down["params"]}


def on_memory(self, task, down, memory, local):
    memory["seen"] = torch.ones(())
    return {"params": local["params"]}, memory


def on_server(self, task, server, uploads):
    for name, value in server["params"].items():
        value.copy_(uploads[0].params[name])
    return server


def on_uploads(self, task, server, uploads):
    uploads[-1].params["fc1.bias"].mul_(0.5)
    return fs.FedAvg().merge(task, server, uploads)


def when_scored(self, task, down, memory):
    down["params"]["fc1.bias"].add_(1)
    return down["params"]


def when_sent(self, task, server, client):
    server["params"]["fc1.bias"].add_(1)
    return {"params": server["params"]}


IN_PLACE = {
    "loss": (on_params, "params['fc2.bias']"),
    "loss ": (on_local, "local['params']['fc2.bias']"),
    "begin": (on_down, "down['params']['fc1.bias']"),
    "finish": (on_memory, "memory['seen']"),
    "merge": (on_server, "server['params']['fc1.weight']"),
    "merge ": (on_uploads, "uploads[0].tree['params']['fc1.bias']"),
    "personal": (when_scored, "down['params']['fc1.bias']"),
    "send": (when_sent, "server['params']['fc1.bias']"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", IN_PLACE)
def test_a_change_in_place(case: str, engine: str) -> None:
    hook, where = IN_PLACE[case]
    text = refusal(made(**{case.strip(): hook}), engine)
    assert text.startswith(f"Broken.{case.strip()}() changed its argument {where}") or hook.__name__ in text
    assert where in text
    assert "in place. A hook must return new tensors" in text


# ---- (b2) a change in place in what a step calls -------------------------------------------------------------------------------
def with_momentum(self, task, down, memory):
    return {"params": down["params"], "m": tree.zeros(down["params"])}


def momentum(self, task, local, grads):
    for name in grads:
        local["m"][name].mul_(0.9).add_(grads[name])
    return {name: local["m"][name].clone() for name in grads}


def momentum_by_name(self, task, local, grads):
    local["m"] = {name: 0.9 * local["m"][name] + grads[name] for name in grads}
    return local["m"]


def smoothed(self, task, before, after):
    for value in before.values():
        value.data.mul_(0.5)
    return tree.clone(after)


IN_A_STEP = {
    "correct": (dict(begin=with_momentum, correct=momentum), "correct", "local['m']["),
    "dictionary": (dict(begin=with_momentum, correct=momentum_by_name), "correct", "local['m']["),
    "after_epoch": (
        dict(phases=lambda self, task: (fs.Phase(after_epoch=self.smooth),), smooth=smoothed), "smoothed", "before[",
    ),
    "uploads": (dict(merge=lambda self, task, server, uploads: (server, uploads.clear())[0]), "merge", "uploads in place"),
    "what was sent": (
        dict(merge=lambda self, task, server, uploads: (server, uploads[0].down.update(params=None))[0]),
        "merge",
        "uploads[0].down['params']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", IN_A_STEP)
def test_a_change_in_place_in_what_a_step_calls(case: str, engine: str) -> None:
    hooks, hook, where = IN_A_STEP[case]
    text = refusal(made(**hooks), engine)
    assert text.startswith(f"Broken.{hook}() changed its argument {where}")
    assert "in place. A hook must return new tensors" in text


# ---- a phase's own functions, and private entries --------------------------------------------------------------------------
def short(self, task, params, batch):
    return self.fit(task, params, batch)


FUNCTIONS = {
    "loss": (
        "(loss of phase 1) takes (task, params, batch) and cannot be called: too many",
        "(task, params, local, batch)",
    ),
    "after_epoch": ("(after_epoch of phase 1) takes (task, local) and cannot be called", "(task, before, after)"),
    "enter": ("(enter of phase 1) takes (task) and cannot be called", "(task, local)"),
}
GIVEN = {
    "loss": short,
    "after_epoch": lambda self, task, local: local,
    "enter": lambda self, task: {},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("field", FUNCTIONS)
def test_a_phase_s_function_with_other_arguments(field: str, engine: str) -> None:
    says, right = FUNCTIONS[field]
    phases = lambda self, task: (fs.Phase(**{field: self._own}),)  # noqa: E731
    text = refusal(made(phases=phases, _own=GIVEN[field]), engine)
    assert text.startswith("Broken.")
    assert says in text
    assert f"It should be a function {right}" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_private_names_that_the_model_does_not_have(engine: str) -> None:
    text = refusal(made(private=lambda self, task: frozenset({"fc2"})), engine)
    assert text == (
        "Broken.private() names 'fc2', which is no entry of the model. It should name entries: 'fc2.weight', 'fc2.bias'"
    )
    text = refusal(made(private=lambda self, task: frozenset({"fc2.wieght"})), engine)
    assert "names 'fc2.wieght', which is no entry of the model. It should name entries: 'fc2.weight'? (one of:" in text


# ---- (c) no decorator --------------------------------------------------------------------------------------------------------
class Bare(fs.FedAvg):
    id: ClassVar[str] = "bare"
    lam: float = fs.setting(0.5, "λ", least=0)


class Bared(fs.FedAvg, mean="uniform"):
    id: ClassVar[str] = "bared"


class Unannotated(fs.FedAvg):
    lam = fs.setting(0.5, "λ", least=0)


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [(Bare, {}, "lam"), (Bare, {"lam": 1.0}, "lam"), (Bared, {}, "mean"), (Unannotated, {}, "lam")],
)
def test_a_missing_decorator(kind: type[fs.Method], given: dict, field: str) -> None:
    says = rf"{kind.__name__} declares {field} without a decorator. Write @dataclass\(frozen=True, kw_only=True\) above class"
    with pytest.raises(HookError, match=says):
        kind(**given)
    with pytest.raises(HookError, match=says):  # a class of it, decorated or not, has not the field either
        dataclass(frozen=True, kw_only=True)(type("Heir", (kind,), {}))()


VALUES = {  # what would be no field, and so not a part of the experiment
    "plain": (
        {"__annotations__": {"mu": float}, "mu": 0.1},
        r"Broken\.mu is no setting.* Write mu: float = fs\.setting\(0\.1, ",
    ),
    "no default": ({"__annotations__": {"mu": float}}, r"Broken\.mu is no setting.* Write mu: float = fs\.setting\("),
    "own init": (
        {"__init__": lambda self, mu=0.1: None},
        r"Broken\.__init__\(\) cannot be written.*mu: float = fs\.setting",
    ),
    "no annotation": ({"mu": 5.0}, r"Broken\.mu has no annotation.*Annotate it: mu: float = fs\.setting\(5\.0, "),
    "a text": ({"scores": "personal"}, r"Broken\.scores = 'personal': it should be \('generic',\), \('personal',\) or"),
    "misspelt": ({"scores": ("personals",)}, r"Broken\.scores = \('personals',\): it should be"),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_that_would_be_no_field(case: str) -> None:
    values, says = VALUES[case]
    with pytest.raises(HookError, match=says):
        dataclass(frozen=True, kw_only=True)(type("Broken", (fs.FedProx,), dict(values)))()


def counting(self, task, params, local, batch):
    self.count = 1
    return self.fit(task, params, batch)


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("decorated", [True, False])
def test_a_hook_that_sets_an_attribute(decorated: bool, engine: str) -> None:
    plain = type("Broken", (fs.FedAvg,), {"loss": counting})
    kind = dataclass(frozen=True, kw_only=True)(plain) if decorated else plain
    text = refusal(kind(), engine)
    assert text.startswith("Broken.loss() at test_contract.py:")
    assert (
        "sets an attribute: cannot assign to field 'count'. A method keeps nothing: state belongs in the memory" in text
    )


def test_a_mixin_may_annotate_what_it_uses() -> None:
    class Mixin:
        mean: str

    class Mixed(Mixin, fs.FedAvg):
        pass

    assert Mixed(mean="uniform").mean == "uniform"


def test_a_class_without_fields_needs_none() -> None:
    class Plain(fs.FedAvg):
        scores: ClassVar[tuple[str, ...]] = ("generic",)

    method = Plain(mean="uniform")
    assert dataclasses.replace(method, mean="weighted") == Plain()


# ---- (d) a tensor's value in Python ------------------------------------------------------------------------------------------
def by_item(self, task, params, local, batch):
    loss = self.fit(task, params, batch)
    return loss if loss.item() > -1 else 2 * loss


def by_if(self, task, down, memory):
    return {"params": down["params"] if task.seen else {n: 2 * v for n, v in down["params"].items()}}


def by_float(self, task, down, memory, local):
    scale = float(next(iter(local["params"].values())).sum())
    return {"params": {n: v * scale for n, v in local["params"].items()}}, memory


READS = {"loss": by_item, "begin": by_if, "finish": by_float}


@pytest.mark.parametrize("case", READS)
def test_a_value_read_in_python(case: str) -> None:
    text = refusal(made(**{case: READS[case]}), "stacked")
    assert text.startswith(f"Broken.{case}() at test_contract.py:")
    assert "reads a tensor's value, by .item(), bool(), float() or a branch (if)" in text
    assert "use torch.where or a mask, or engine='one'" in text


@pytest.mark.parametrize("case", READS)
def test_a_value_read_in_python_is_said_once_where_the_engine_is_chosen(case: str, capsys) -> None:
    many, method = ragged(((6, 2),) * 12), made(**{case: READS[case]})  # so many that stacking pays
    for _ in range(2):
        given = run(method, "normed", many, engine="auto", rounds=1, participation=1.0)
        assert given.engine == "one"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedstill: clients can be trained one by one only: Broken.{case}() at test_contract.py:")
    assert "use torch.where" in line
    asked = run(method, "normed", many, engine="one", rounds=1, participation=1.0)  # one client may read its numbers
    assert identical(states(asked), states(given))
    assert capsys.readouterr().err == ""


# ---- (e) a wrong result ------------------------------------------------------------------------------------------------------
def many(self, task, params, local, batch):
    return torch.nn.functional.cross_entropy(task.logits(params, batch), batch.y, reduction="none")


def a_float(self, task, params, local, batch):
    return 0.5


def detached(self, task, params, local, batch):
    return self.fit(task, params, batch).detach()


def missing(self, task, down, memory):
    return {n: v for n, v in down["params"].items() if n != "fc1.bias"}


def transposed(self, task, down, memory):
    return {**down["params"], "fc1.weight": down["params"]["fc1.weight"].T}


def growing(self, task, down, memory, local):
    return {"params": local["params"]}, {"v": torch.cat([memory["v"], memory["v"]])}


def in_another_type(self, task, down, memory, local):
    return {"params": local["params"]}, {"v": memory["v"].float()}


KEEPS = {"init_client": lambda self, task, params: {"v": torch.zeros(2, dtype=torch.float64)}}
RESULTS = {
    "a loss for each sample": ({"loss": many}, "loss() returned a tensor of shape 4", "one number"),
    "a number": ({"loss": a_float}, "loss() returned a float", "one number"),
    "a detached loss": ({"loss": detached}, "loss()", "one number, a function of params"),
    "one tree": (
        {"finish": lambda self, task, down, memory, local: {"params": local["params"]}},
        "finish() returned one tree (params)",
        "(upload, memory)",
    ),
    "a list": ({"begin": lambda self, task, down, memory: [down]}, "begin() returned a list of 1", "a tree"),
    "a number in a tree": ({"send": lambda self, t, server, k: {**server, "n": 3}}, "returned a int as 'n'", "a tree"),
    "none": ({"merge": lambda self, task, server, uploads: None}, "merge() returned a NoneType", "a tree"),
    "no entry": ({"personal": missing}, "personal() returned no 'fc1.bias'", "every entry of the model"),
    "another shape": ({"personal": transposed}, "shape 4×6 as 'fc1.weight'", "of the shape 6×4"),
    "a growing memory": ({**KEEPS, "finish": growing}, "gives the memory's 'v' as 4", "one form"),
    "another type": ({**KEEPS, "finish": in_another_type}, "float32, which was 2 torch.float64", "one form"),
    "a new entry": (
        {"finish": lambda self, task, down, memory, local: (local, {**memory, "v": torch.ones(())})},
        "finish() adds 'v' of the memory",
        "init_client returns it with zeros",
    ),
    "no model": ({"begin": lambda self, task, down, memory: {"model": down["params"]}}, "no 'params'", "every model"),
    "one phase": ({"phases": lambda self, task: fs.Phase()}, "phases() returned a Phase", "a tuple of fedstill.Phase"),
    "a step's loss": (
        {"step": lambda self, task, local, batch: (local, local["params"]["fc1.weight"])},
        "step() returned a tensor of shape 6×4",
        "(local, loss)",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", RESULTS)
def test_a_wrong_result(case: str, engine: str) -> None:
    hooks, says, remedy = RESULTS[case]
    text = refusal(made(**hooks), engine)
    assert text.startswith("Broken.")
    assert says in text
    assert remedy in text


# ---- the rehearsal itself ------------------------------------------------------------------------------------------------------
class Counted(fs.FedPer):
    """FedPer by another class, which is rehearsed."""


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_rehearsal_changes_no_bit_and_draws_nothing(engine: str) -> None:
    before = torch.get_rng_state()
    ours, theirs = run(Counted(), "normed", engine=engine), run(fs.FedPer(), "normed", engine=engine)
    assert torch.equal(before, torch.get_rng_state())
    assert identical(states(ours), states(theirs))


def test_it_is_for_methods_of_ones_own_and_on_few_samples(monkeypatch) -> None:
    seen: list[int] = []
    plain = rehearsal._alone

    def noted(bench, together):
        seen.extend(bench.data.train.sizes)
        return plain(bench, together)

    monkeypatch.setattr(rehearsal, "_alone", noted)

    class Own(fs.FedPer):
        pass

    run(fs.FedPer(), rounds=1)
    assert seen == []
    run(Own(), data=ragged(((300, 2), (200, 2), (90, 2))), rounds=1)
    assert seen == [4, 4]


def test_the_same_is_rehearsed_once(tmp_path: Path, monkeypatch) -> None:
    made: list[str] = []
    for half in ("_alone", "_stacked"):
        plain = getattr(rehearsal, half)
        monkeypatch.setattr(
            rehearsal, half, lambda *given, half=half, plain=plain: (made.append(half), plain(*given))[1]
        )

    @dataclass(frozen=True, kw_only=True)
    class Own(fs.FedProx):
        pass

    for seed in (1, 2, 3):
        run(Own(), engine="one", rounds=1, seed=seed)
    assert made == ["_alone"]  # the engine one needs no other half
    run(Own(), engine="stacked", rounds=1)
    assert made == ["_alone"] * 2 + ["_stacked"]
    run(Own(mu=0.5), engine="one", rounds=1)
    assert made == ["_alone"] * 2 + ["_stacked"] + ["_alone"]
    folder = str(tmp_path / "r")
    made.clear()
    fs.simulate(Own(mu=0.7), model=make("plain"), data=ragged(), engine="one", rounds=1, out=folder)
    assert made == ["_alone"]


class Krum(fs.FedAvg):
    """A merge that needs three uploads at least."""

    def merge(self, task, server, uploads):
        v = torch.stack([torch.cat([p.flatten() for p in u.tree["params"].values()]) for u in uploads])
        best = torch.cdist(v, v).topk(3, largest=False).values.sum(1).argmin()
        return {**server, "params": tree.clone(uploads[int(best)].tree["params"])}


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_merge_is_given_as_many_uploads_as_a_round_has(engine: str) -> None:
    six = ragged(((6, 2),) * 6)
    assert run(Krum(), "plain", six, engine=engine, rounds=1, participation=0.5).history


# ---- by command ------------------------------------------------------------------------------------------------------------
HEAD = "from dataclasses import dataclass\nfrom typing import ClassVar\nimport torch\nimport fedstill as fs\n\n"
ONE = "@dataclass(frozen=True, kw_only=True)\nclass M(fs.FedAvg):\n    id: ClassVar[str] = 'mine'\n"
LOSS = "    def loss(self, task, params, local, batch):\n        v = self.fit(task, params, batch)\n"
FILES = {
    "misspelt": (ONE + LOSS.replace("loss(self", "losss(self") + "        return v\n", "Did you mean loss(task"),
    "in place": (
        ONE + "    def begin(self, task, down, memory):\n"
        "        next(iter(down['params'].values())).zero_()\n        return {'params': down['params']}\n",
        "M.begin() changed its argument down['params']",
    ),
    "undecorated": (
        ONE.partition("\n")[2] + "    lam: float = fs.setting(0.5, 'weight')\n" + LOSS + "        return v\n",
        "M declares lam without a decorator",
    ),
    "item": (ONE + LOSS + "        return v if v.item() > 0 else 2 * v\n", "M.loss() at my_method.py:"),
    "wrong result": (
        ONE + "    def finish(self, task, down, memory, local):\n        return {'params': local['params']}\n",
        "M.finish() returned one tree (params). It should return two trees, (upload, memory)",
    ),
}


@pytest.mark.parametrize(("command", "engine"), [("run", "one"), ("run", "stacked"), ("check", "both")])
@pytest.mark.parametrize("case", FILES)
def test_by_command(case: str, engine: str, command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(own, "_allowed", [False])
    code, says = FILES[case]
    (tmp_path / "my_method.py").write_text(HEAD + code)
    how = (
        ["--rounds", "1", "--clients", "3", "--epochs", "1", "--no-out", "--engine", engine] if command == "run" else []
    )
    before = dict(METHODS)
    try:
        status = main([command, f"{tmp_path}/my_method.py:M", *how])
    finally:
        METHODS.clear()
        METHODS.update(before)
    shown = capsys.readouterr()
    if command == "run":
        if case == "item" and engine == "one":  # one client's number may be read
            assert (status, shown.err) == (0, "")
            return
        assert status == 2
        assert shown.err.startswith("fedstill: ")
        assert (shown.err.count("\n"), shown.out) == (1, "")
        assert says in shown.err
    else:
        assert status == (1 if case in ("in place", "item", "wrong result") else 2)
        assert says in shown.out + shown.err
