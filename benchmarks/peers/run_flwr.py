"""Flower: a ServerApp with FedAvg and a ClientApp by run_simulation, on Ray; stepped by the strategy's central evaluation."""

from __future__ import annotations

import flower_client
import nets
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from wire import Turn

turn = Turn()
spec, path = turn.spec, turn.spec["data"]
model, server = nets.build(spec["workload"]), ServerApp()
steps = 0


def total(records, key):
    global steps
    steps = sum(int(record["metrics"]["steps"]) for record in records)
    return MetricRecord({"steps": steps})


def between(round, arrays) -> None:
    """Between two rounds: answer and wait."""
    if round:
        turn.answer(turn.done(), steps)

    def loss() -> float:
        model.load_state_dict(arrays.to_torch_state_dict())
        return nets.loss(model, path)

    turn.wait(loss)


@server.main()
def main(grid, context) -> None:
    strategy = FedAvg(
        fraction_train=spec["cohort"] / spec["clients"],
        fraction_evaluate=0.0,
        min_available_nodes=spec["clients"],
        train_metrics_aggr_fn=total,
    )
    turn.ready("flwr", "ray", "torch")
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10**6, evaluate_fn=between)


run_simulation(
    server,
    flower_client.app(spec),
    num_supernodes=spec["clients"],
    backend_config={
        "init_args": {"num_cpus": spec["actors"]},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    },
)
