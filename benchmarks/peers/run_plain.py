"""The loop that most people write: DataLoader, optim.SGD, deepcopy, a mean of state dicts."""

from __future__ import annotations

import copy
import random

import nets
import torch
import torch.nn.functional as F
from wire import Turn

turn = Turn()
spec = turn.spec
server, path = nets.build(spec["workload"]), spec["data"]
loaders = [nets.loader(path, k, spec["batch"]) for k in range(spec["clients"])]


def one_round() -> int:
    cohort, steps, mean = random.sample(range(spec["clients"]), spec["cohort"]), 0, {}
    total = sum(len(loaders[k].dataset) for k in cohort)
    for k in cohort:
        client = copy.deepcopy(server)
        optimiser = torch.optim.SGD(client.parameters(), lr=spec["lr"])
        client.train()
        for x, y in loaders[k]:
            optimiser.zero_grad()
            F.cross_entropy(client(x), y).backward()
            optimiser.step()
            steps += 1
        share = len(loaders[k].dataset) / total
        for name, value in client.state_dict().items():
            mean[name] = mean[name] + value * share if name in mean else value * share
    server.load_state_dict(mean)
    return steps


turn.ready("torch")
turn.serve(one_round, int, lambda: nets.loss(server, path))
