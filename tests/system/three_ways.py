"""What `test_deploy.py` starts under torchrun: an experiment on the ranks and in rank 0 alone; writes the models of both.

python -m torch.distributed.run --nproc-per-node 2 tests/system/three_ways.py OUT DATA METHOD…
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from safetensors.torch import save_file

import fedstill as fs
from fedstill.run import cluster

HELD = {"rounds": 3, "lr": 0.05, "momentum": 0.9, "device": "cpu", "engine": "one"}


def models(run: fs.Run) -> dict[str, fs.Params]:
    """The model that serves each client and, where the method has one, the generic one."""
    found = {f"personal-{k}": run.served(k) for k in range(3)}
    return {**found, "generic": run.generic()} if "generic" in run.method.scores else found


if __name__ == "__main__":
    with cluster.joined(reduce=False) as ranks:
        if ranks is not None:
            for name, dtype in itertools.product(sys.argv[3:], ("float64", "float32")):
                one = fs.Experiment(method=fs.METHODS[name](), data=sys.argv[2], dtype=dtype, workers=1, **HELD)
                for way, transport in (("local", None), ("cluster", ranks)):
                    flat = {
                        f"{model}/{entry}": leaf.contiguous().clone()
                        for model, state in models(fs.run(one, transport=transport)).items()
                        for entry, leaf in state.items()
                    }
                    save_file(flat, Path(sys.argv[1]) / f"{name}-{dtype}-{way}.safetensors")
