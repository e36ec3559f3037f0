"""We: FedAvg by `fedstill.simulate`, stepped by its progress callback."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import nets
from wire import Turn

import fedstill as fs

turn = Turn()
spec = turn.spec
model, path = nets.build(spec["workload"]), spec["data"]
fed = fs.Federation.from_arrays([(x, y, x[:2], y[:2]) for x, y in nets.clients(path)], classes=10)
workers = {"workers": spec["workers"]} if "workers" in {f.name for f in fields(fs.Training)} else {}
if spec["workers"] > 1 and not workers:
    raise SystemExit("this fedstill has no setting 'workers' yet")


def progress(record: dict[str, Any]) -> None:
    turn.answer(turn.done(), record["steps"])
    if record["round"] < spec["rounds"]:  # the last round is followed by scores: it is never timed
        turn.wait(lambda: nets.loss(model, path))


turn.ready("fedstill", "torch")
turn.wait(lambda: nets.loss(model, path))
run = fs.simulate(
    fs.FedAvg(), model=model, data=fed, rounds=spec["rounds"], participation=spec["cohort"] / spec["clients"], epochs=1,
    batch_size=spec["batch"], lr=spec["lr"], momentum=0.0, engine="one", device="cpu", eval_every=spec["rounds"],
    progress=progress, **workers,
)  # fmt: skip
model.load_state_dict(run.generic())
turn.wait(lambda: nets.loss(model, path))
