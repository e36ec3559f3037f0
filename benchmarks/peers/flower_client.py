"""The ClientApp of `run_flwr.py`: a module of its own, so that Ray's actors import it once and keep its data."""

from __future__ import annotations

import nets
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def app(spec) -> ClientApp:
    client = ClientApp()

    @client.train()
    def train(message, context):
        return train_one(spec, message, int(context.node_config["partition-id"]))

    return client


def train_one(spec, message: Message, k: int) -> Message:
    model = nets.build(spec["workload"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimiser, steps = torch.optim.SGD(model.parameters(), lr=spec["lr"]), 0
    loader = nets.loader(spec["data"], k, spec["batch"])
    for x, y in loader:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        steps += 1
    found = MetricRecord({"num-examples": len(loader.dataset), "steps": steps})
    return Message(content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": found}), reply_to=message)
