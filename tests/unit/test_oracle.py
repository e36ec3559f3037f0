"""`one` against the loop that anybody would write: nn.Module, optim.SGD, deepcopy. Bit for bit in float64.

The oracle shares nothing with the library but the plan's order of samples and cohorts, which are data here.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import fedstill as fs
from fedstill.core.plan import Plan

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


def test_scaffold_with_some_of_the_clients_and_a_server_step() -> None:
    """Control variates written out: option II, |S|/N, η_g ≠ 1, mini-batches, three of five clients a round."""
    s, fed, server_lr = SETTINGS, ragged(), 0.5
    plan, net = Plan(s["seed"], s["batch_size"]), make("plain")
    x = [p.detach().clone() for p in net.parameters()]
    c = [torch.zeros_like(p) for p in x]
    own = [[torch.zeros_like(p) for p in x] for _ in fed.clients]
    for t in range(1, s["rounds"] + 1):
        cohort, drift, change = plan.cohort(t, range(5), 3), [], []
        for k in cohort:
            data, client, steps = fed.clients[k], copy.deepcopy(net), 0
            y = list(client.parameters())
            for p, start in zip(y, x, strict=True):
                p.data = start.clone()
            for epoch in range(s["epochs"]):
                for rows in torch.from_numpy(plan.order(t, k, len(data.y_train), epoch)).split(s["batch_size"]):
                    grads = torch.autograd.grad(F.cross_entropy(client(data.x_train[rows]), data.y_train[rows]), y)
                    for i, p in enumerate(y):
                        p.data -= s["lr"] * (grads[i] + s["weight_decay"] * p.data - own[k][i] + c[i])
                    steps += 1
            new = [own[k][i] - c[i] + (x[i] - p.data) / (steps * s["lr"]) for i, p in enumerate(y)]
            drift.append([p.data - start for p, start in zip(y, x, strict=True)])
            change.append([a - b for a, b in zip(new, own[k], strict=True)])
            own[k] = new
        x = [a + server_lr * sum(d[i] for d in drift) / 3 for i, a in enumerate(x)]
        c = [a + 3 / 5 * sum(d[i] for d in change) / 3 for i, a in enumerate(c)]
    state = simulated(fs.SCAFFOLD(server_lr=server_lr)).generic()
    assert max((v - expected).abs().max() for v, expected in zip(state.values(), x, strict=True)) < 1e-12
