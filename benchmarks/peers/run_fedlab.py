"""FedLab: SGDSerialClientTrainer and SyncServerHandler, the loop of its StandalonePipeline.

It imports torchvision for data sets that are not used here; an empty stand-in takes its place.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import nets
from wire import Turn


def main() -> None:
    transforms, torchvision = ModuleType("torchvision.transforms"), ModuleType("torchvision")
    torchvision.transforms = transforms
    sys.modules |= {"torchvision": torchvision, "torchvision.transforms": transforms}
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.contrib.dataset.basic_dataset import FedDataset

    logging.disable()
    turn = Turn()
    spec, path = turn.spec, turn.spec["data"]

    class Data(FedDataset):
        def get_dataloader(self, id, batch_size, type="train"):
            return nets.loader(path, id, batch_size)

    model, taken = nets.build(spec["workload"]), []
    handler = SyncServerHandler(model, global_round=10**6, sample_ratio=spec["cohort"] / spec["clients"])
    handler.num_clients = spec["clients"]
    trainer = SGDSerialClientTrainer(model, spec["clients"])
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, spec["batch"], spec["lr"])
    trainer.optimizer.register_step_post_hook(lambda *_: taken.append(1))

    def one_round() -> int:
        taken.clear()
        cohort = handler.sample_clients()
        trainer.local_process(handler.downlink_package, cohort)
        for pack in trainer.uplink_package:
            handler.load(pack)
        return len(taken)

    turn.ready("fedlab", "torch")
    turn.serve(one_round, int, lambda: nets.loss(handler.model, path))


if __name__ == "__main__":
    main()
