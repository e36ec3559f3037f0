"""Apple's pfl: FederatedAveraging on a SimulatedBackend, stepped by a callback; on two cores two processes."""

# ruff: noqa: E402 (pfl reads its addresses from the environment when it is imported)
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

first, together = len(sys.argv) == 2, json.loads(sys.argv[1])["processes"] > 1
if first and together:  # the second process is the same program with an argument more
    ports = [socket.socket() for _ in range(2)]
    for port in ports:
        port.bind(("localhost", 0))
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port.getsockname()[1]}" for port in ports)
    for port in ports:
        port.close()
    os.environ["PFL_WORKER_RANK"] = "1"
    second = subprocess.Popen([sys.executable, *sys.argv, "second"], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    os.environ["PFL_WORKER_RANK"] = "0"

import nets
import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from wire import Turn

turn = Turn()
spec, path = turn.spec, turn.spec["data"]
steps = 0


class Net(torch.nn.Module):
    """pfl asks the module for its loss and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nets.build(spec["workload"])

    def forward(self, x):
        return self.net(x)

    def loss(self, x, y):
        global steps
        steps += 1
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Stepped(TrainingProcessCallback):
    """Between two rounds: answer and wait, both processes."""

    def on_train_begin(self, *, model):
        if first:
            turn.ready("pfl", "torch")
        self.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        global steps
        seconds, total = turn.done(), torch.tensor(steps)
        if together:
            torch.distributed.all_reduce(total)
        if first:
            turn.answer(seconds, total.item())
        steps = 0
        self.wait()
        return False, Metrics()

    def wait(self) -> None:
        if first:
            turn.wait(lambda: nets.loss(net, path))
        if together:
            torch.distributed.barrier()
        turn.restart()


np.random.seed(0)
net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
users = {str(k): list(xy) for k, xy in enumerate(nets.clients(path))}
data = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=spec["cohort"], val_cohort_size=None
    ),
    SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
    model,
    NNTrainHyperParams(local_batch_size=spec["batch"], local_num_epochs=1, local_learning_rate=spec["lr"]),
    callbacks=[Stepped()],
    send_metrics_to_platform=False,
)
