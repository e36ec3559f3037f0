"""`one` against the loop that anybody would write: nn.Module, optim.SGD, deepcopy. Bit for bit in float64.

The oracle shares nothing with the library but the plan's order of samples and cohorts, which are data here.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import fedstill as fs
from fedstill.plan import Plan

from ..problems import SETTINGS, make, ragged


def loop(model, fed, loss_of, *, uniform: bool, head_epochs: int | None = None):
    """Plain federated training; `loss_of(net, teacher, x, y)`; with `head_epochs`, FedRep's two phases and private heads."""
    s, plan = SETTINGS, Plan(SETTINGS["seed"], SETTINGS["batch_size"])
    server, teachers = model, {}
    heads = [copy.deepcopy(model.fc2.state_dict()) for _ in fed.clients]
    for t in range(1, s["rounds"] + 1):
        cohort = plan.cohort(t, range(len(fed)), 3)
        results = []
        for k in cohort:
            data, net = fed.clients[k], copy.deepcopy(server)
            if head_epochs is None:
                phases = [(list(net.parameters()), s["epochs"])]
            else:
                net.fc2.load_state_dict(heads[k])
                phases = [(list(net.fc2.parameters()), head_epochs), (list(net.fc1.parameters()), 1)]
            for moving, epochs in phases:
                optimiser = torch.optim.SGD(moving, lr=s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"])
                for epoch in range(epochs):
                    order = torch.from_numpy(plan.order(t, k, len(data.y_train), epoch))
                    for rows in order.split(s["batch_size"]):
                        loss = loss_of(net, teachers.get(k), data.x_train[rows], data.y_train[rows])
                        optimiser.zero_grad()
                        loss.backward()
                        optimiser.step()
            teachers[k], heads[k] = copy.deepcopy(net), copy.deepcopy(net.fc2.state_dict())
            results.append((1.0 if uniform else len(data.y_train), net.state_dict()))
        total = sum(w for w, _ in results)
        mean = {n: sum(w / total * state[n] for w, state in results) for n in server.state_dict()}
        if head_epochs is not None:
            mean = {n: v for n, v in mean.items() if not n.startswith("fc2")}
        server = copy.deepcopy(server)
        server.load_state_dict({**server.state_dict(), **mean})
    return server.state_dict(), teachers, heads


def cross_entropy(net, teacher, x, y):
    return F.cross_entropy(net(x), y)


def simulated(method: fs.Method) -> fs.Run:
    return fs.simulate(method, model=make("plain"), data=ragged(), **SETTINGS, engine="one")


@pytest.mark.parametrize("mean", ["weighted", "uniform"])
def test_fedavg(mean: str) -> None:
    run = simulated(fs.FedAvg(mean=mean))
    server, _, _ = loop(make("plain"), ragged(), cross_entropy, uniform=mean == "uniform")
    assert max((run.generic()[n] - v).abs().max() for n, v in server.items()) < 1e-15


def test_pfedsd_equation() -> None:
    lam, tau = 0.7, 2.0

    def distilling(net, teacher, x, y):
        loss = F.cross_entropy(net(x), y)
        if teacher is None:
            return loss
        with torch.no_grad():
            q = F.softmax(teacher(x) / tau, dim=1)
        return loss + lam * tau**2 * F.kl_div(F.log_softmax(net(x) / tau, dim=1), q, reduction="batchmean")

    run = simulated(fs.PFedSD(lam=lam, tau=tau))
    server, teachers, _ = loop(make("plain"), ragged(), distilling, uniform=True)
    assert max((run.generic()[n] - v).abs().max() for n, v in server.items()) < 1e-13
    assert teachers, "nobody trained"
    for k in range(5):
        expected = teachers[k].state_dict() if k in teachers else server
        assert max((run.personal(k)[n] - v).abs().max() for n, v in expected.items()) < 1e-13


def test_fedrep_phases_and_private_heads() -> None:
    run = simulated(fs.FedRep(head_epochs=2, body_epochs=1))
    server, _, heads = loop(make("plain"), ragged(), cross_entropy, uniform=False, head_epochs=2)
    for k in range(5):
        personal = run.personal(k)
        for name in ("fc1.weight", "fc1.bias"):
            assert (personal[name] - server[name]).abs().max() < 1e-14
        for name, value in heads[k].items():
            assert (personal[f"fc2.{name}"] - value).abs().max() < 1e-14
