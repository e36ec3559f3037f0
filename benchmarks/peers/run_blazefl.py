"""BlazeFL: its FedAvg, one client after another, in a pool of threads, or in a pool of processes over shared memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nets
import torch
from blazefl.contrib import fedavg
from blazefl.core import IPCMode
from wire import Turn


class Models:
    def select_model(self, model_name):
        return nets.build(model_name)


class Data:
    def __init__(self, path: str) -> None:
        self.path = path

    def get_dataloader(self, type_, cid, batch_size, generator=None):
        return nets.loader(self.path, cid, batch_size, generator)

    def set_dataset(self, type_, cid, dataset) -> None:
        """Nothing to keep: data sets do not change."""


def main() -> None:
    turn = Turn()
    spec, path = turn.spec, turn.spec["data"]
    nets.clients(path)  # read before processes are forked
    common = {
        "model_selector": Models(), "model_name": spec["workload"], "dataset": Data(path), "device": "cpu",
        "num_clients": spec["clients"], "batch_size": spec["batch"], "seed": 0,
    }  # fmt: skip
    server = fedavg.FedAvgBaseServerHandler(global_round=10**6, sample_ratio=spec["cohort"] / spec["clients"], **common)
    common |= {"epochs": 1, "lr": spec["lr"]}
    folder = Path(tempfile.mkdtemp(dir=spec["scratch"]))
    if spec["pool"] == "processes":
        warm = nets.build(
            spec["workload"]
        )  # what a first step imports, the processes of every round's new pool inherit
        torch.optim.SGD(warm.parameters(), lr=spec["lr"]).step()
        trainer = fedavg.FedAvgProcessPoolClientTrainer(
            share_dir=folder / "share", state_dir=folder / "state", num_parallels=2, ipc_mode=IPCMode.SHARED_MEMORY,
            **common,
        )  # fmt: skip
    elif spec["pool"] == "threads":
        trainer = fedavg.FedAvgThreadPoolClientTrainer(num_parallels=2, **common)
    else:
        trainer = fedavg.FedAvgBaseClientTrainer(**common)

    def one_round() -> int:
        cohort = server.sample_clients()
        trainer.local_process(server.downlink_package(), cohort)
        packs = trainer.uplink_package()
        for pack in packs:
            server.load(pack)
        return sum(pack.data_size for pack in packs)

    turn.ready("blazefl", "torch")
    turn.serve(one_round, lambda samples: samples / spec["batch"], lambda: nets.loss(server.model, path))


if __name__ == "__main__":
    main()
