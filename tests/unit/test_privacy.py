"""What uploads reveal: ε against independent values, and what is refused."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import nn

import fedstill as fs
from fedstill.core import plan, tree
from fedstill.core.errors import InputError, TrainingError
from fedstill.core.plan import Plan
from fedstill.models import seeded
from fedstill.report.summary import summary
from fedstill.report.text import UNKNOWN
from fedstill.run.experiment import Training
from fedstill.server import privacy
from fedstill.server.sampler import SAMPLERS, Memory
from fedstill.transport.local import LocalTransport

from ..problems import Normed, Plain, ragged

SETTINGS = [  # (rate, noise, steps, δ)
    (0.01, 1.0, 1000, 1e-5),
    (256 / 60_000, 1.1, 3516, 1e-5),  # 15 epochs of MNIST in batches of 256
    (0.1, 2.0, 300, 1e-5),
    (0.5, 4.0, 60, 1e-6),
]


def integrated(rate: float, noise: float, steps: int, delta: float) -> float:
    """ε by RDP with the moment integrated numerically: A(α) = E_{x~N(0,σ²)} ((1−q) + q·exp((2x−1)/2σ²))^α.

    The moment: Mironov, Talwar and Zhang, 2019; from RDP to (ε, δ): Balle et al., AISTATS 2020, Theorem 21.
    """
    x: NDArray[np.float64] = np.linspace(-40 * noise, 40 * noise + 80, 200_001)
    log_density = stats.norm.logpdf(x, scale=noise)
    log_ratio = np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + (2 * x - 1) / (2 * noise**2))
    best = math.inf
    for order in np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11.0, 80.0)]):
        log_values = log_density + order * log_ratio
        top = log_values.max()
        log_moment = top + math.log(np.trapezoid(np.exp(log_values - top), x))
        rdp = steps * log_moment / (order - 1)
        best = min(best, rdp + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return best


def test_the_values_that_the_issue_names() -> None:
    spent = {0.01: 1000}
    assert privacy.epsilon(spent, 1.0, 1e-5, "rdp") == pytest.approx(2.10, rel=0.01)
    assert privacy.epsilon(spent, 1.0, 1e-5, "pld") == pytest.approx(1.83, rel=0.01)


@pytest.mark.parametrize("setting", SETTINGS)
def test_rdp_against_an_integration_and_against_opacus(setting: tuple[float, float, int, float]) -> None:
    from opacus.accountants import RDPAccountant

    rate, noise, steps, delta = setting
    ours = privacy.epsilon({rate: steps}, noise, delta, "rdp")
    theirs = RDPAccountant()
    theirs.history = [(noise, rate, steps)]
    assert ours == pytest.approx(integrated(*setting), rel=0.01)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=0.01)


@pytest.mark.parametrize("setting", SETTINGS)
def test_pld_against_opacus(setting: tuple[float, float, int, float]) -> None:
    from opacus.accountants import PRVAccountant

    rate, noise, steps, delta = setting
    theirs = PRVAccountant()
    theirs.history = [(noise, rate, steps)]
    ours = privacy.epsilon({rate: steps}, noise, delta, "pld")
    assert ours == pytest.approx(theirs.get_epsilon(delta, eps_error=0.005), rel=0.01)


@pytest.mark.parametrize(("noise", "steps"), [(5.0, 20), (0.05, 1)])  # the second in seconds and within the memory
def test_without_sampling_pld_is_the_gaussian_mechanism_itself(noise: float, steps: int) -> None:
    delta = 1e-5
    reach = math.sqrt(steps) / noise  # T rounds of noise σ are one of noise σ/√T

    def exact(eps: float) -> float:  # Balle and Wang, ICML 2018, Theorem 8
        return float(stats.norm.cdf(reach / 2 - eps / reach) - math.exp(eps) * stats.norm.cdf(-reach / 2 - eps / reach))

    assert exact(privacy.epsilon({1.0: steps}, noise, delta, "pld")) == pytest.approx(delta, rel=0.05)


def test_noise_too_small_for_a_bound_stops_the_run_before_anything_is_sent() -> None:
    with pytest.raises(
        fs.TrainingError, match=r"round 1: ε is not known, so nothing is sent: .* noise_multiplier 1e-09"
    ):
        central(noise_multiplier=1e-9, accountant="pld")


def test_steps_of_several_rates_add_up() -> None:
    for accountant in ("rdp", "pld"):
        both = privacy.epsilon({0.1: 10, 0.2: 5}, 1.5, 1e-5, accountant)  # type: ignore[arg-type]
        more = privacy.epsilon({0.2: 15}, 1.5, 1e-5, accountant)  # type: ignore[arg-type]
        fewer = privacy.epsilon({0.1: 15}, 1.5, 1e-5, accountant)  # type: ignore[arg-type]
        assert fewer < both < more


def test_nothing_sent_costs_nothing_and_no_noise_protects_nothing() -> None:
    assert privacy.epsilon({}, 1.0, 1e-5) == 0.0
    assert privacy.epsilon({0.5: 1}, 0.0, 1e-5) == math.inf
    assert privacy.epsilon({0.5: 1}, 1e-9, 1e-5, "pld") == math.inf
    with pytest.raises(ValueError, match="rates above 0"):
        privacy.epsilon({1.5: 1}, 1.0, 1e-5)


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'fedstill\[privacy\]'"):
        privacy.accounting()


# ---- noise at the merge ------------------------------------------------------------------------------------------------
CENTRAL: dict[str, Any] = {
    "privacy": "central",
    "noise_multiplier": 2.0,
    "clip_norm": 0.5,
    "device": "cpu",
    "epochs": 1,
}


def central(method: fs.Method | None = None, model: Any = Plain, **changes: Any) -> fs.Run:
    values = {**CENTRAL, "rounds": 2, "lr": 0.1, **changes}
    return fs.simulate(method or fs.FedAvg(mean="uniform"), model=model, data=ragged(), **values)


def mean_of(clip: float, noise: float, expected: float = 4.0, key: int = 7) -> privacy.NoisyMean:
    return privacy.NoisyMean(clip, noise, expected, ("w",), key)


def test_the_private_mean_clips_each_change_and_divides_by_the_expected_number() -> None:
    around = {"w": torch.tensor([1.0, 1.0], dtype=torch.float64), "other": torch.zeros(1)}
    near, far = {"w": torch.tensor([1.3, 1.4])}, {"w": torch.tensor([7.0, 9.0])}  # changes of length 0.5 and 10
    got = mean_of(1.0, 0.0)([near, far], [1.0, 1.0], around)
    assert list(got) == ["w"]
    torch.testing.assert_close(
        got["w"], torch.tensor([1 + 0.9 / 4, 1 + 1.2 / 4], dtype=torch.float64), atol=1e-7, rtol=0
    )


def test_one_client_more_moves_the_sum_by_the_clipping_norm_at_most() -> None:
    g = torch.Generator().manual_seed(0)
    around = {"w": torch.zeros(5, dtype=torch.float64)}
    clients = [{"w": 10 ** (2 * torch.rand(1, generator=g) - 1) * torch.randn(5, generator=g)} for _ in range(20)]
    for k in range(1, 20):
        with_, without = (mean_of(0.7, 1.0, 1.0)(clients[:n], [1.0] * n, around)["w"] for n in (k + 1, k))
        assert float((with_ - without).norm()) <= 0.7 + 1e-12


def test_the_noise_is_normal_of_the_promised_deviation_and_differs_by_key() -> None:
    around = {"w": torch.zeros(40_000, dtype=torch.float64)}
    one, other = (mean_of(0.5, 3.0, 2.0, key)([], [], around)["w"] for key in (1, 2))
    deviation = 3.0 * 0.5 / 2.0
    assert stats.kstest(one.numpy() / deviation, "norm").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.03
    torch.testing.assert_close(one, mean_of(0.5, 3.0, 2.0, 1)([], [], around)["w"], rtol=0, atol=0)


def test_the_private_mean_refuses_unequal_weights_and_changes_without_a_start() -> None:
    entry = {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match="equal weights"):
        mean_of(1.0, 1.0)([entry, entry], [1.0, 2.0], entry)
    with pytest.raises(ValueError, match="started from"):
        mean_of(1.0, 1.0)([entry], [1.0])


def test_a_run_says_in_every_record_what_it_has_spent() -> None:
    run = central(rounds=4)
    spent = [privacy.epsilon({1.0: t}, 2.0, 1e-5, "rdp") for t in range(1, 5)]
    assert [record["epsilon"] for record in run.history] == spent
    assert spent == sorted(spent)
    assert f"{spent[-1]:.3g}" in run.table()
    assert "ε of fedavg: each client's changes (central: clipped to 0.5, noise × 2" in run.table()


def test_what_is_sent_is_the_noisy_mean_of_what_clients_sent() -> None:
    class Seen:
        def on_start(self, coordinator: Any) -> None:
            self.before = tree.clone(coordinator.state.server)

        def on_round(self, coordinator: Any, record: Any) -> None:
            self.after = tree.clone(coordinator.state.server)

        def on_end(self, coordinator: Any) -> None: ...

    seen, still = Seen(), Seen()
    central(rounds=1, callbacks=[seen], dtype="float64", clip_norm=1e-3, noise_multiplier=50.0)
    central(rounds=1, callbacks=[still], dtype="float64", clip_norm=1e-3, noise_multiplier=1e-12)
    moved = torch.cat([(seen.after["params"][n] - still.after["params"][n]).flatten() for n in seen.after["params"]])
    key = torch.tensor(plan.key(0, plan.NOISE, 1) - (1 << 63))
    expected = plan.normals(key, len(moved)) * 50.0 * 1e-3 / 5
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-9)


def test_every_round_and_every_seed_has_noise_of_its_own() -> None:
    """Next to no training, so that what moves the model is noise."""
    quiet = {
        "clip_norm": 1e-6,
        "noise_multiplier": 1e6,
        "dtype": "float64",
        "participation": 0.01,
        "sampler": "poisson",
    }
    models = [central(model=seeded(Wide, 0), rounds=t, **quiet).generic() for t in (1, 2, 3)]
    other = central(model=seeded(Wide, 0), rounds=1, seed=1, **quiet).generic()
    start = {n: v.double() for n, v in seeded(Wide, 0).state_dict().items()}
    pairs = [(start, models[0]), (models[0], models[1]), (models[1], models[2]), (start, other)]
    moved = torch.stack([torch.cat([(b[n] - a[n]).flatten() for n in start]) for a, b in pairs])
    assert float((torch.corrcoef(moved) - torch.eye(4)).abs().max()) < 0.1
    assert stats.kstest(moved[1].numpy() / float(moved[1].std()), "norm").pvalue > 1e-3


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 500), nn.Linear(500, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def test_clients_that_are_sampled_cost_less_and_a_round_of_nobody_still_has_noise() -> None:
    run = central(participation=0.2, sampler="poisson", rounds=12)
    sizes = [len(record["participants"]) for record in run.history]
    assert 0 in sizes
    assert max(sizes) > 1
    assert run.history[-1]["spent"] == {"0.2": 12}
    assert run.history[-1]["epsilon"] < privacy.epsilon({1.0: 12}, 2.0, 1e-5)
    moved = [central(participation=0.2, sampler="poisson", rounds=sizes.index(0) + n).generic() for n in (0, 1)]
    assert sizes[0]
    assert all((moved[0][n] != moved[1][n]).all() for n in moved[0])


def test_in_simulated_time_every_sampled_client_counts_however_slow() -> None:
    run = central(participation=0.2, sampler="poisson", rounds=12, profile="lognormal:2")
    assert max(len(record["asked"]) for record in run.history) > 1  # more than are wanted on average
    assert all(record["participants"] == record["asked"] and not record["busy"] for record in run.history)


def test_poisson_sampling_takes_each_client_by_itself() -> None:
    scene = Memory().scene(Plan(3, 16), 1, range(4000), np.ones(4000, dtype=np.int64), np.ones(4000))
    taken = [set(SAMPLERS["poisson"](dataclasses.replace(scene, round=t), 400)) for t in range(1, 21)]
    assert stats.kstest([stats.binom.cdf(len(t), 4000, 0.1) for t in taken], "uniform").pvalue > 1e-3
    both = np.mean([len(a & b) for a, b in itertools.pairwise(taken)])
    assert both == pytest.approx(40, abs=6)


AVERAGING = (fs.FedProx(mean="uniform"), fs.FedAvgM(mean="uniform"), fs.PFedSD(), fs.Ditto(mean="uniform"), fs.PFedMe())


@pytest.mark.parametrize("method", AVERAGING)
def test_methods_that_average_models_are_taken(method: fs.Method) -> None:
    run = central(method)
    assert run.history[-1]["epsilon"] > 0
    assert ("personal models stay home" in run.table()) == ("personal" in method.scores)


class Varying(fs.FedAvg):
    id = "varying"
    upload_varies = True


REFUSED: list[tuple[fs.Method, dict[str, Any], str]] = [
    (fs.FedAvg(), {}, "mean = 'weighted': should be 'uniform'"),
    (fs.SCAFFOLD(), {}, "method = 'scaffold': should be one whose clients' uploads are only averaged"),
    (fs.FedDyn(), {}, "method = 'feddyn': should be"),
    (fs.Local(), {}, "method = 'local': should be"),
    (Varying(mean="uniform"), {}, "method = 'varying': should be one that uploads the same entries in every round"),
    (fs.PFedSD(stateless=True), {}, "method = 'pfedsd': should be one that uploads weights alone"),
    (fs.FedAvg(mean="uniform"), {"average": "median"}, "average = 'median': should be 'mean' with privacy 'central'"),
    (fs.FedAvg(mean="uniform"), {"attack": "alie"}, "attack = 'alie': should be none, "),
    (fs.FedAvg(mean="uniform"), {"participation": 0.5}, "sampler = 'uniform': should be 'poisson'"),
    (fs.FedAvg(mean="uniform"), {"model": Normed}, "model = .*: should be without statistics such as BatchNorm's"),
    (fs.FedAvg(mean="uniform"), {"privacy_delta": 0.1, "clients": 20}, "privacy_delta = 0.1: should be below 1/20"),
    (fs.FedAvg(mean="uniform"), {"profile": "uniform", "mode": "fedbuff"}, "mode = 'fedbuff': should be 'sync'"),
    (fs.FedAvg(mean="uniform"), {"profile": "uniform", "over_select": 2.0}, "over_select = 2.0: should be 1.0"),
    (fs.FedAvg(mean="uniform"), {"profile": "uniform", "deadline": 1.0}, "deadline = 1.0: should be 0.0"),
    (
        fs.FedAvg(mean="uniform"),
        {"privacy_budget": 1.0, "rounds": 9},
        r"privacy_budget = 1.0: should be at least .* \(it allows ",
    ),
    (fs.FedAvg(mean="uniform"), {"noise_multiplier": 0.0}, "noise_multiplier = 0.0"),
]


@pytest.mark.parametrize(("method", "changes", "words"), REFUSED)
def test_what_makes_no_sense_is_refused(method: fs.Method, changes: dict[str, Any], words: str) -> None:
    changes = dict(changes)
    data = ragged(((4, 2),) * changes.pop("clients", 5))
    values = {**CENTRAL, "rounds": 2, "model": Plain, **changes}
    with pytest.raises(InputError, match=words):
        fs.simulate(method, data=data, **values)


def test_a_method_that_overrides_merge_must_say_that_noise_covers_it() -> None:
    class Own(fs.FedAvg):
        id = "own"

        def merge(self, task: Any, server: Any, uploads: Any) -> Any:
            return super().merge(task, server, uploads)

    assert fs.FedAvg.noisy_mean
    assert not Own.noisy_mean


def test_a_spent_budget_and_a_history_without_epsilon_stop_the_run_before_anything_is_sent() -> None:
    allowed = privacy.epsilon({1.0: 3}, 2.0, 1e-5)
    ledger = privacy.Ledger(Training(privacy="central", noise_multiplier=2.0, privacy_budget=allowed))
    history: list[dict[str, Any]] = []
    for t in range(1, 4):
        history.append({"round": t, **ledger(history, [0], 1.0)})
    with pytest.raises(TrainingError, match="round 4: the privacy budget is spent: ε would be"):
        ledger(history, [0], 1.0)
    louder = privacy.Ledger(Training(privacy="central", noise_multiplier=4.0))
    with pytest.raises(TrainingError, match=r"round 4: ε .* in the last record is not what its steps cost with these"):
        louder(history, [0], 1.0)
    for broken in ({"round": 1}, {"round": 1, "epsilon": None, "spent": {}}, {"round": 1, "epsilon": 0.1}):
        with pytest.raises(TrainingError, match="its record does not say what was spent"):
            ledger([broken], [0], 1.0)


class Listening(LocalTransport):
    """Counts the orders that were sent."""

    sent: ClassVar[list[str]] = []

    def dispatch(self, orders: Any, *rest: Any) -> Any:
        self.sent.extend(order.kind for order in orders)
        return super().dispatch(orders, *rest)


def test_a_run_that_may_not_go_on_sends_no_order_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listening, "sent", [])
    monkeypatch.setattr(privacy.Ledger, "epsilon", lambda self, spent: 0.1 if len(spent) == 0 else math.nan)
    with pytest.raises(TrainingError, match="round 1: ε is not known, so nothing is sent"):
        central(transport=Listening)
    assert "train" not in Listening.sent


def test_what_was_spent_goes_on_after_a_resume(tmp_path: Path) -> None:
    whole = fs.Experiment(
        method=fs.FedAvg(mean="uniform"), rounds=4, clients=5, checkpoint_every=2, participation=0.4, sampler="poisson",
        **CENTRAL,
    )  # fmt: skip
    straight = fs.run(whole, out=tmp_path / "a")
    fs.run(dataclasses.replace(whole, rounds=2), out=tmp_path / "b")
    resumed = fs.resume(tmp_path / "b", rounds=4)
    assert [r["epsilon"] for r in resumed.history] == [r["epsilon"] for r in straight.history]
    assert all(torch.equal(resumed.generic()[n], value) for n, value in straight.generic().items())


def test_the_summary_says_what_was_spent_and_on_what() -> None:
    run = central()
    experiments = {"fedavg": fs.Experiment(method=fs.FedAvg(mean="uniform"), **CENTRAL)}
    content = summary(experiments, {"fedavg": [("fedavg", run)]}, UNKNOWN, {})
    assert content["methods"]["fedavg"]["runs"][0]["epsilon"] == run.history[-1]["epsilon"]
    assert content["scores"]["epsilon"].startswith("each client's changes (central: clipped to 0.5")
