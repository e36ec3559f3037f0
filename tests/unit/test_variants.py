"""What the laws do not see of methods' variants: clusters, a teacher's dropout, a warm start, one fine-tuning at the end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedstill as fs
from fedstill.core.batch import Batch
from fedstill.methods import clustered

from ..problems import CLASSES, SETTINGS, SIZES, distance, identical, make, ragged, run, states


# ---- clusters -----------------------------------------------------------------------------------------------------------
def planted(g: np.random.Generator, of: list[int]) -> list[dict[str, torch.Tensor]]:
    centres = 10 * g.normal(size=(3, 5))
    return [{"w": torch.tensor(centres[c] + 0.1 * g.normal(size=5))} for c in of]


def test_divide_finds_planted_clusters() -> None:
    for seed in range(20):
        of = [0, 1, 2, 1, 0, 2, 2, 0]
        found = clustered.divide(planted(np.random.default_rng(seed), of), 3)
        assert len(set(zip(of, found, strict=True))) == 3  # the same division, by whatever numbers
    alike = [{"w": torch.ones(2)}] * 3
    assert clustered.divide(alike, 2) == [0, 0, 0]  # one stays empty, and it ends


def test_clients_are_sent_their_clusters_model() -> None:
    """Two kinds of clients with swapped labels: the clusters are the kinds, and each one's model is the mean of its own."""
    g, clients = np.random.default_rng(0), []
    centres = 3 * g.normal(size=(2, 4))
    for k in range(6):
        y = g.integers(0, 2, 20)
        x = centres[y] + 0.3 * g.normal(size=(20, 4))
        clients.append((x[:15], (y[:15] + k) % 2, x[15:], (y[15:] + k) % 2))
    fed = fs.Federation.from_arrays(clients, classes=CLASSES)
    found = run(fs.PFedSD(clusters=2), data=fed, participation=1.0, rounds=5)
    cluster = {k: int(found.server["cluster"][str(k)]) for k in range(6)}
    assert cluster == {k: cluster[k % 2] for k in range(6)}
    assert cluster[0] != cluster[1]
    for k in range(6):
        sent = found.method.send(found.task, found.server, k)["params"]
        own = [found.personal(j) for j in range(6) if cluster[j] == cluster[k]]
        mean = {name: sum(v[name].double() for v in own) / len(own) for name in sent}
        assert distance({"": sent}, {"": mean}) < 1e-12
    assert found.score(model="personal") > found.score(model="generic")


def test_too_many_clusters_and_means_that_are_not_one_are_refused() -> None:
    with pytest.raises(fs.InputError, match="clusters = 6: should be at most 5"):
        run(fs.PFedSD(clusters=6))
    for changes in ({"server": "adam"}, {"average": "median"}, {"mode": "fedbuff", "profile": "uniform"}):
        run(fs.PFedSD(), rounds=1, **changes)
        with pytest.raises(fs.InputError):
            run(fs.PFedSD(clusters=2), rounds=1, **changes)
    fewer = run(fs.PFedSD(clusters=3), participation=0.4)  # two a round: never enough uploads at once
    assert fewer.server["centres"] == {}
    assert identical(states(fewer), states(run(fs.PFedSD(), participation=0.4)))


# ---- the teacher --------------------------------------------------------------------------------------------------------
def test_a_teacher_in_training_mode_drops_and_normalises_by_the_batch() -> None:
    task = run(fs.PFedSD(), "normed", rounds=1).task
    net, x = make("normed"), torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = {name: value.clone() for name, value in net.state_dict().items()}
    before = {name: value.clone() for name, value in params.items()}
    batch = Batch(x, torch.zeros(8, dtype=torch.int64), torch.arange(8), torch.tensor(7))
    one, again, other = (task.beside(params, batch, stream) for stream in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.allclose(one, task.logits(dict(params), batch))  # its mask is not the student's
    assert not torch.allclose(one, task.net(dict(params), x, train=False))
    still = task.beside({**before}, batch, 1)
    assert torch.equal(still, one)
    kept = {name: value.clone() for name, value in before.items()}
    task.beside(kept, batch, 1)
    assert all(torch.equal(kept[name], value) for name, value in before.items())  # running statistics too


def test_teacher_modes_differ_where_there_is_dropout_and_only_there() -> None:
    modes = [fs.PFedSD(teacher_mode=mode, lam=1.0) for mode in ("eval", "train")]
    a, b = (run(method, "normed", participation=1.0) for method in modes)
    assert distance(states(a), states(b)) > 1e-4
    a, b = (run(method, "plain", participation=1.0) for method in modes)
    assert distance(states(a), states(b)) < 1e-12


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"teacher": "predictions", "teacher_mode": "train"}, "teacher_mode = 'train': should be 'eval'"),
        ({"teacher": "ditto", "stateless": True}, "teacher = 'ditto': should be 'model'"),
        ({"clusters": 0}, "clusters = 0: should be a whole number at least 1"),
    ],
)
def test_wrong_fields_are_refused(fields: dict, says: str) -> None:
    with pytest.raises(fs.InputError, match=says):
        fs.PFedSD(**fields)


def test_a_teacher_without_noise_has_no_dp_sgd() -> None:
    how = {"privacy": "local", "noise_multiplier": 1.0, "participation": 1.0, "rounds": 1}
    run(fs.PFedSD(), **how)
    with pytest.raises(fs.InputError):
        run(fs.PFedSD(teacher="ditto"), **how)


# ---- LG-FedAvg's warm start ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_warm_rounds_hand_everybody_fedavgs_model(engine: str) -> None:
    """After two warm rounds a client has FedAvg's body until it trains; then its own, under the mean of heads."""
    how = {"engine": engine, "participation": 0.4}
    warm = run(fs.FedAvg(), rounds=2, **how)
    found = run(fs.LGFedAvg(warm_rounds=2), rounds=3, **how)
    (after,) = [record["participants"] for record in found.history if record["round"] == 3]
    assert 0 < len(after) < len(SIZES)
    generic, head = warm.generic(), {"fc2.weight", "fc2.bias"}
    for k in range(len(SIZES)):
        own = found.personal(k)
        same = {name: torch.equal(own[name], generic[name]) for name in own if name not in head}
        assert all(same.values()) if k not in after else not any(same.values())
        assert all(torch.equal(own[name], found.personal(0)[name]) for name in head)
    up = [record["bytes_up"] for record in found.history]
    assert up[0] == up[1] > up[2]
    assert identical({"": run(fs.LGFedAvg(warm_rounds=2), rounds=2, **how).generic()}, {"": generic})


def test_warm_rounds_go_on_after_a_resume(tmp_path) -> None:
    method = fs.LGFedAvg(warm_rounds=2)
    experiment = fs.Experiment(
        method=method, rounds=4, epochs=1, clients=5, participation=0.6, checkpoint_every=1, device="cpu"
    )
    whole = fs.run(experiment, out=tmp_path / "whole")
    fs.run(dataclasses.replace(experiment, rounds=3), out=tmp_path / "cut")
    assert identical(states(whole), states(fs.resume(tmp_path / "cut", rounds=4)))


# ---- FedBABU by its paper -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", ["head", "all"])
def test_fedbabu_fine_tuned_once_at_the_end(part: str) -> None:
    """Without rounds of tuning the score `fine_tune` is SGD from the federated body under h⁰, written out here."""
    federation = ragged(tuple((n, 40) for n, _ in SIZES))
    how = {**SETTINGS, "batch_size": 100, "participation": 1.0}  # full batches, whatever their order
    found = fs.simulate(
        fs.FedBABU(personal_epochs=0), model=make("plain"), data=federation, **how, fine_tune=4, fine_tune_part=part
    )
    start = found.generic()
    assert torch.equal(start["fc2.weight"].double(), make("plain").state_dict()["fc2.weight"])
    expected = []
    for client in federation.clients:
        net = make("plain")
        net.load_state_dict({name: value.double() for name, value in start.items()})
        chosen = net.parameters() if part == "all" else net.fc2.parameters()
        sgd = torch.optim.SGD(chosen, lr=0.05, momentum=0.9, weight_decay=1e-3)
        for _ in range(4):
            net.zero_grad()
            F.cross_entropy(net(client.x_train.double()), client.y_train).backward()
            sgd.step()
        expected.append(float((net(client.x_test.double()).argmax(1) == client.y_test).double().mean()))
    assert found.fine_tuned(4, part) == pytest.approx(np.mean(expected), abs=1e-12)
