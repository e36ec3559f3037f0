"""What `test_cluster.py` starts under torchrun: methods on the ranks and in rank 0 alone; prints how far apart they are.

python -m torch.distributed.run --nproc-per-node 2 tests/system/ranks.py OUT REDUCE METHOD…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fedstill as fs
from fedstill.run import cluster

SMALL = {
    "clients": 9, "rounds": 3, "epochs": 1, "participation": 0.6, "engine": "one", "workers": 1, "device": "cpu",
    "checkpoint_every": 1, "batch_size": 32, "dtype": "float64", "new": True, "averaged": True, "fine_tune": 1,
    "newcomers": 1, "join_epochs": 1, "forgetting": True,
}  # fmt: skip


def records(run: fs.Run) -> list[dict]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in run.history]


def distance(ours: fs.Params, theirs: fs.Params) -> float:
    assert ours.keys() == theirs.keys()
    return max((float((v.double() - theirs[n].double()).abs().max()) for n, v in ours.items() if v.numel()), default=0)


def compare(method: str, out: Path, transport: cluster.Cluster) -> dict[str, object]:
    """Return how a run on the ranks differs from the same in this process."""
    adapters = {"lora": "r=2,alpha=4,targets=all-linear"} if fs.METHODS[method].needs_lora else {}
    one = fs.Experiment(method=fs.METHODS[method](), **SMALL, **adapters)
    alone = fs.run(one, out=out / "alone" / method)
    spread = fs.run(one, out=out / "ranks" / method, transport=transport)
    checkpoints = [out / kind / method / "checkpoints" / "round-000003.safetensors" for kind in ("alone", "ranks")]
    return {
        "history": records(alone) == records(spread),
        "scores": alone.after == spread.after,
        "checkpoint": checkpoints[0].read_bytes() == checkpoints[1].read_bytes(),
        "generic": distance(alone.generic(), spread.generic()),
        "personal": max(distance(alone.personal(k), spread.personal(k)) for k in range(9)),
        "flops": alone.cost.flops == spread.cost.flops,
    }


if __name__ == "__main__":
    with cluster.joined(reduce=bool(int(sys.argv[2]))) as ranks:
        if ranks is not None:
            for name in sys.argv[3:]:
                print(json.dumps({"method": name, **compare(name, Path(sys.argv[1]), ranks)}), flush=True)
