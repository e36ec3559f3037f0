"""DP-SGD at clients: clipped gradients against opacus, the same noise in both engines, and what it covers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import fedstill as fs
from fedstill.core import plan, tree
from fedstill.core.batch import Batch
from fedstill.core.errors import InputError, TrainingError
from fedstill.core.plan import JointPlan, Plan
from fedstill.engine import private
from fedstill.engine.step import over_clients
from fedstill.methods import METHODS
from fedstill.models import seeded
from fedstill.server import privacy
from fedstill.transport.local import LocalTransport

from ..problems import CLASSES, Normed, Plain, needed, ragged


class Small(nn.Module):
    """A convolution, GroupNorm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1))


class Dropped(Plain):
    """Two linear layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.tanh(self.fc1(x))))


def batch_of(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Batch:
    return Batch(x, y, torch.arange(len(y)), torch.tensor(5), mask)


def problem(kind: str, clients: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    module = (Plain() if kind == "mlp" else Small()).double()
    shape = (4,) if kind == "mlp" else (1, 6, 6)
    x = torch.randn(clients, 11, *shape, generator=g, dtype=torch.float64) * 3
    return module, x, torch.randint(CLASSES, (clients, 11), generator=g)


def opacus(module: nn.Module, x: Tensor, y: Tensor, clip: float) -> dict[str, Tensor]:
    """Each sample's clipped gradient, as opacus' optimizer makes it before it sums."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(module, strict=False)
    F.cross_entropy(wrapped(x), y).backward()
    grads = {name: p.grad_sample.detach() for name, p in module.named_parameters()}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (clip / (norms + 1e-6)).clamp(max=1.0)
    wrapped.zero_grad()
    wrapped.to_standard_module()
    return {n: torch.einsum("i,i...->i...", factor, g) for n, g in grads.items()}


def lengths(grads: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_clipped_gradients_are_those_of_opacus(kind: str) -> None:
    module, x, y = problem(kind, clients=3)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(module, weights, (batch.x,)), batch.y)

    whole = private.clipped(loss, 1e9, weights, batch_of(x[0], y[0]))[0]
    clip = float(lengths(whole).median())

    def alone(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return private.clipped(loss, clip, weights, batch_of(x, y))[0]

    stacked = over_clients(alone, tree.stack([weights] * 3), x, y)
    for k in range(3):
        expected, one = opacus(module, x[k], y[k], clip), alone(weights, x[k], y[k])
        assert float(lengths(one).max()) == pytest.approx(clip)  # some are clipped
        assert float(lengths(one).min()) < 0.99 * clip  # some are not
        for name in weights:
            torch.testing.assert_close(one[name], expected[name], atol=1e-6, rtol=0)
            torch.testing.assert_close(stacked[name][k], expected[name], atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_whole_round_is_that_of_opacus_optimizer(engine: str) -> None:
    """Without noise, in full batches: clipping, the sum, its division and SGD with momentum."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    client = ragged(((9, 3),)).clients[0]
    module = seeded(Plain, 0).double()
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    wrapped = GradSampleModule(module)
    theirs = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=9)
    for _ in range(4):
        theirs.zero_grad()
        F.cross_entropy(wrapped(client.x_train.double()), client.y_train).backward()
        theirs.step()
    round_ = {"rounds": 1, "epochs": 4, "batch_size": 9, "clip_norm": 0.3, "noise_multiplier": 1e-13, "engine": engine}
    last = Last()
    fs.simulate(fs.FedAvg(), model=seeded(Plain, 0), data=ragged(((9, 3),)), callbacks=[last], **{**LOCAL, **round_})
    for name, value in module.state_dict().items():
        torch.testing.assert_close(last.server[f"params|{name}"], value, atol=1e-6, rtol=0)


def test_a_samples_gradient_depends_on_no_other_sample() -> None:
    module, x, y = problem("mlp")
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(module, weights, (batch.x,)), batch.y)

    other = x[0].clone()
    other[4] = 1e6
    one, two = (private.clipped(loss, 0.7, weights, batch_of(each, y[0]))[0] for each in (x[0], other))
    for name in weights:
        rest = [i for i in range(11) if i != 4]
        torch.testing.assert_close(one[name][rest], two[name][rest], rtol=0, atol=0)


def test_the_noise_has_the_same_bits_stacked_or_not() -> None:
    keys = torch.tensor([5, 1 << 61, 77777])
    for n in (1, 3, 17, 1001):
        stacked = vmap(lambda k, n=n: plan.normals(k, n))(keys)
        for k, row in zip(keys, stacked, strict=True):
            assert torch.equal(row, plan.normals(k, n))


# ---- batches -----------------------------------------------------------------------------------------------------------
def test_each_sample_takes_part_by_itself() -> None:
    rows, keys = Plan(3, 20).private(2, 0, 7, 400, 500)
    sizes = np.array([len(r) for r in rows])
    at_random = np.random.default_rng(0).random(500)  # within each step of the discrete distribution
    place = stats.binom.cdf(sizes, 400, 0.05) - at_random * stats.binom.pmf(sizes, 400, 0.05)
    assert stats.kstest(place, "uniform").pvalue > 1e-3
    taken = np.bincount(np.concatenate(rows), minlength=400)
    assert stats.kstest(stats.binom.cdf(taken, 500, 0.05), "uniform").statistic < 0.15
    assert len(set(keys.tolist())) == 500
    assert keys.min() >= 0
    again, other = Plan(3, 20).private(2, 0, 7, 400, 500), Plan(3, 20).private(2, 1, 7, 400, 500)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again[0], strict=True))
    assert not np.array_equal(keys, other[1])  # a phase of its own: other samples and other noise
    assert [len(r) for r in other[0]] != sizes.tolist()
    assert all(len(r) == 5 for r in Plan(3, 20).private(1, 0, 0, 5, 9)[0])  # no more samples than a batch: all, always


def test_tables_hold_the_same_batches() -> None:
    joint = JointPlan((Plan(1, 4), Plan(2, 4)), 3)
    tables = plan.private_tables(joint, 2, 1, [4, 0, 2], [13, 7, 9], [5, 3, 3], torch.device("cpu"))
    for column, (slot, n, steps) in enumerate([(4, 13, 5), (0, 7, 3), (2, 9, 3)]):
        rows, keys = Plan(1 + slot // 3, 4).private(2, 1, slot % 3, n, steps)
        assert tables.key[:steps, column].tolist() == keys.tolist()
        for s in range(steps):
            assert tables.index[s, column][tables.real[s, column]].tolist() == rows[s].tolist()


# ---- runs --------------------------------------------------------------------------------------------------------------
LOCAL: dict[str, Any] = {
    "privacy": "local", "noise_multiplier": 1.0, "clip_norm": 0.5, "device": "cpu", "dtype": "float64", "rounds": 2,
    "epochs": 2, "lr": 0.1, "momentum": 0.5, "batch_size": 4,
}  # fmt: skip
FEW = {"epochs": 1, "batch_size": 64}  # steps, of the digits
COVERED = (
    "ditto", "fedavg", "fedavgm", "fedbabu", "fedbn", "feddyn", "fedgkd", "fedper", "fedprox", "fedrep", "fedsa-lora", "ffa-lora",
    "lg-fedavg", "pfedsd", "scaffold",
)  # fmt: skip


class Last:
    """Keeps the server's state and the clients' models as they are at the end."""

    def on_start(self, coordinator: Any) -> None: ...

    def on_round(self, coordinator: Any, record: Any) -> None:
        self.server = tree.flatten(tree.clone(coordinator.state.server))

    def on_end(self, coordinator: Any) -> None: ...


def local(method: fs.Method | None = None, model: Any = Plain, **changes: Any) -> dict[str, Tensor]:
    last = Last()
    values = {**LOCAL, **needed(method or fs.FedAvg()), **changes}
    run = fs.simulate(method or fs.FedAvg(), model=seeded(model, 0), data=ragged(), callbacks=[last], **values)
    own = {f"{k}|{n}": v for k in run.clients for n, v in run.personal(k).items()}
    return {**last.server, **own}


def close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=name)


def test_the_methods_that_say_they_are_covered() -> None:
    assert tuple(sorted(name for name, method in METHODS.items() if method.noisy_steps)) == COVERED


@pytest.mark.parametrize("name", COVERED)
def test_both_engines_agree(name: str) -> None:
    method = METHODS[name]()
    close(*(local(method, Dropped, engine=engine) for engine in ("one", "stacked")))


class Chain(nn.Module):
    """Linear layers and ReLU, of which the loop without autograd is otherwise taken."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def test_fast_paths_are_not_taken_around_it() -> None:
    slow = local(model=Chain, engine="one", fast=False)
    close(slow, local(model=Chain, engine="one"))
    close(slow, local(model=Chain, engine="stacked", compile="traced"))
    close(slow, local(model=Chain, engine="stacked", cohort=2))
    close(slow, local(model=Chain, engine="one", workers=2))


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_without_noise_clipping_and_sampling_it_is_sgd(name: str, engine: str) -> None:
    """The oracle is the path without privacy, in full batches."""
    plain = {"privacy": "off", "batch_size": 50, "engine": engine}
    off = {"noise_multiplier": 1e-13, "clip_norm": 1e6, "batch_size": 50, "engine": engine}
    close(local(METHODS[name](), **plain), local(METHODS[name](), **off), atol=1e-6)


NOT_IN_ONE_STEP = ("fedrep", "fedavgm", "feddyn", "fedsa-lora")  # the last one's A has no slope where B = 0


@pytest.mark.parametrize("name", [name for name in COVERED if name not in NOT_IN_ONE_STEP])
def test_one_sample_moves_an_upload_by_no_more_than_its_clipped_gradient(name: str) -> None:
    """Of a single step: another sample changes what the server sees by 2·η·C/b at most, however odd it is."""
    seen = []
    for federation in (ragged(((9, 3),)), changed(ragged(((9, 3),)))):
        one = {"rounds": 1, "epochs": 1, "momentum": 0.0, "batch_size": 9, "noise_multiplier": 1e-13}
        last = Last()
        values = {**LOCAL, **needed(METHODS[name]()), **one}
        fs.simulate(METHODS[name](), model=seeded(Plain, 0), data=federation, callbacks=[last], **values)
        seen.append(last.server)
    moved = torch.cat([(seen[0][n] - seen[1][n]).flatten() for n in seen[0] if n.startswith("params")]).norm()
    assert 1e-4 < float(moved) <= 2 * 0.1 * 0.5 / 9 + 1e-9


def changed(federation: fs.Federation) -> fs.Federation:
    """One sample of client 0 is another one."""
    client = federation.clients[0]
    x, y = client.x_train.clone(), client.y_train.clone()
    x[2], y[2] = 1e3, (y[2] + 1) % CLASSES
    return fs.Federation.from_arrays([(x, y, client.x_test, client.y_test)], classes=CLASSES)


def test_noise_is_what_was_promised() -> None:
    """With next to no gradient, one step moves the weights by η·σ·C/b times normal numbers."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 2000), nn.Linear(2000, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(torch.tanh(self.fc1(x)))

    one = {"rounds": 1, "epochs": 1, "momentum": 0.0, "batch_size": 9, "noise_multiplier": 1e6, "clip_norm": 1e-6}
    last, start = Last(), seeded(Wide, 0)
    before = {n: v.double().clone() for n, v in start.state_dict().items()}
    fs.simulate(fs.FedAvg(), model=start, data=ragged(((9, 3),)), callbacks=[last], **{**LOCAL, **one})
    moved = torch.cat([(last.server[f"params|{n}"] - value).flatten() for n, value in before.items()])
    assert stats.kstest(moved.numpy() / (0.1 * 1.0 / 9), "norm").pvalue > 1e-3


def test_epsilon_is_that_of_each_clients_steps() -> None:
    run = fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), **LOCAL)
    record = run.history[-1]
    sizes = [13, 7, 1, 10, 5]
    for k, n in enumerate(sizes):
        size = min(4, n)
        steps = 2 * 2 * -(-n // size)
        assert record["spent"][str(k)] == steps
        assert record["epsilon_clients"][str(k)] == privacy.epsilon({size / n: steps}, 1.0, 1e-5)
    assert record["epsilon"] == max(record["epsilon_clients"].values())
    assert record["loss"] == 0.0  # a client's loss is not sent
    assert "ε of fedavg: each sample (local: its gradients clipped to 0.5, noise × 1 in each step" in run.table()


def test_phases_of_the_uploaded_model_spend_and_models_that_stay_home_do_not() -> None:
    rep = fs.simulate(fs.FedRep(head_epochs=3, body_epochs=1), model=Plain, data=ragged(), **LOCAL)
    ditto = fs.simulate(fs.Ditto(personal_epochs=7), model=Plain, data=ragged(), **LOCAL)
    assert rep.history[-1]["spent"]["0"] == 2 * (3 + 1) * 4
    assert ditto.history[-1]["spent"]["0"] == 2 * 2 * 4
    assert "the same steps trained them, so ε holds for them too" in rep.table()
    assert "to publish one would reveal its data, without a bound" in ditto.table()


def test_who_was_not_asked_has_not_spent() -> None:
    run = fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), **{**LOCAL, "participation": 0.4, "rounds": 3})
    asked = [k for record in run.history for k in [*record["participants"], *record["missing"]]]
    each = {k: 2 * -(-n // min(4, n)) for k, n in enumerate([13, 7, 1, 10, 5])}
    assert run.history[-1]["spent"] == {str(k): asked.count(k) * each[k] for k in each if k in asked}


class Listening(LocalTransport):
    """Counts the orders that were sent."""

    sent: ClassVar[list[tuple[str, int]]] = []

    def dispatch(self, orders: Any, *rest: Any) -> Any:
        self.sent.extend((order.kind, order.round) for order in orders)
        return super().dispatch(orders, *rest)


def test_a_spent_budget_stops_the_run_before_the_rounds_orders_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listening, "sent", [])
    free = fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), **{**LOCAL, "participation": 0.4, "rounds": 6})
    spent = [record["epsilon"] for record in free.history]
    values = {**LOCAL, "participation": 0.4, "rounds": 6, "privacy_budget": spent[2]}
    stops = 1 + next(t for t, e in enumerate(spent) if e > spent[2])
    with pytest.raises(TrainingError, match=f"round {stops}: the privacy budget is spent"):
        fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), transport=Listening, **values)
    assert max(t for kind, t in Listening.sent if kind == "train") == stops - 1


RARELY = {"profile": "lognormal:2", "mode": "fedasync", "rounds": 4}


@pytest.mark.parametrize(
    ("changes", "fits"), [({"newcomers": 4, "seed": 1}, True), (RARELY, True), ({"rounds": 4}, False)]
)
def test_a_budget_is_refused_before_the_run_only_where_it_cannot_do(changes: dict[str, Any], fits: bool) -> None:
    values = {**LOCAL, **changes}
    spent = fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), **values).history[-1]["epsilon"]
    if fits:  # what newcomers would spend, or clients that are still at work, does not count
        fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), **values, privacy_budget=1.001 * spent)
    with pytest.raises((InputError, TrainingError), match=r"privacy.budget"):
        fs.simulate(fs.FedAvg(), model=Plain, data=ragged(), **values, privacy_budget=0.999 * spent)


def test_a_resumed_run_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    whole = fs.Experiment(clients=4, checkpoint_every=1, model="mlp", **{**LOCAL, **FEW, "rounds": 3})
    straight = fs.run(whole, out=tmp_path / "a")
    fs.run(dataclasses.replace(whole, rounds=2), out=tmp_path / "b")
    resumed = fs.resume(tmp_path / "b", rounds=3)
    assert [r["epsilon_clients"] for r in resumed.history] == [r["epsilon_clients"] for r in straight.history]
    assert all(torch.equal(resumed.generic()[n], value) for n, value in straight.generic().items())


def test_seeds_side_by_side_are_the_runs_by_themselves() -> None:
    whole = fs.Experiment(clients=4, model="mlp", engine="stacked", **{**LOCAL, **FEW})
    runs = fs.run_together([dataclasses.replace(whole, seed=seed) for seed in (0, 1)])
    for seed, run in enumerate(runs):
        alone = fs.run(dataclasses.replace(whole, seed=seed))
        assert run.history[-1]["epsilon"] == alone.history[-1]["epsilon"]
        close(run.generic(), alone.generic())


def test_what_is_tuned_after_the_federation_has_no_noise() -> None:
    quiet, loud = (
        fs.simulate(
            fs.FedAvg(), model=Plain, data=ragged(),
            **{**LOCAL, "fine_tune": 30, "fine_tune_part": "all", "noise_multiplier": sigma, "clip_norm": 1e-9},
        ).after["fine_tuned_sample"]
        for sigma in (1.0, 2.0)
    )  # fmt: skip
    assert quiet == loud  # by noise of such a size nothing changes, without it everything is learnt
    assert quiet > 0.6


REFUSED: list[tuple[fs.Method, dict[str, Any], str]] = [
    (fs.FedRoD(), {}, "method = 'fedrod': should be one whose uploads follow from gradients of samples alone"),
    (fs.FedPAC(), {}, "method = 'fedpac'"),
    (fs.PFedMe(), {}, "method = 'pfedme'"),
    (fs.Local(), {}, "method = 'local'"),
    (fs.PFedSD(regulariser="ewc"), {}, "regulariser = 'ewc': should be 'kl', 'mse' or 'l2' with privacy 'local'"),
    (fs.FedAvg(), {"model": Normed}, "model = bn.running_mean: should be without layers as BatchNorm"),
    (fs.FedAvg(), {"privacy_delta": 0.1}, "privacy_delta = 0.1: should be below 1/13"),
    (fs.FedAvg(), {"sampler": "power-of-choice"}, "sampler = 'power-of-choice': should be another"),
    (fs.FedAvg(), {"average": "fltrust", "root_samples": 5}, "average = 'fltrust': should be another"),
    (fs.FedAvg(), {"forgetting": True}, "forgetting = True: should be False"),
    (
        fs.FedAvg(),
        {"privacy_budget": 1.0},
        r"privacy_budget = 1.0: should be at least .* \(it allows 0\), or more noise",
    ),
]


@pytest.mark.parametrize(("method", "changes", "words"), REFUSED)
def test_what_is_not_covered_is_refused(method: fs.Method, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fs.simulate(method, data=ragged(), **{"model": Plain, **LOCAL, **changes})


def test_a_method_of_ones_own_must_say_that_it_is_covered() -> None:
    class Own(fs.FedAvg):
        id = "own"

        def finish(self, task: Any, down: Any, memory: Any, local: Any) -> Any:
            return super().finish(task, down, memory, local)

    assert not Own.noisy_steps


def test_a_step_of_a_methods_own_is_never_taken_without_noise() -> None:
    """Even a method that says it is covered."""

    class Says(fs.PFedMe):
        id = "says"
        noisy_steps = True

    with pytest.raises(RuntimeError, match=r"Says.step\(\) has no DP-SGD"):
        fs.simulate(Says(), model=Plain, data=ragged(), **{**LOCAL, "engine": "one"})
