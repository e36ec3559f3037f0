"""What goes wrong outside of engines: replies that are missing or absurd, uploads of a wrong form, mistakes in hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import fedstill as fs
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.transport.messages import Reply

from ..problems import SETTINGS, Tampered, cut_and_resumed, make, ragged, rows, run


def trained(method: fs.Method, change: Callable[[Reply], Reply | None], **changes) -> fs.Run:
    settings = {**SETTINGS, "engine": "one", "participation": 1.0, **changes}
    return fs.simulate(method, model=make("plain"), data=ragged(), transport=Tampered(change), **settings)


@pytest.mark.parametrize("steps", [float("nan"), float("inf"), -5.0])
def test_absurd_numbers_in_a_report_reject_that_client(steps: float) -> None:
    def change(reply: Reply) -> Reply:
        odd = reply.kind == "train" and reply.client == 2
        return dataclasses.replace(reply, report={**reply.report, "steps": steps}) if odd else reply

    result = trained(fs.FedAvg(), change)
    assert [record["rejected"] for record in result.history] == [{"2": f"it reports {steps:g} steps"}] * 3
    assert result.history[0]["participants"] == [0, 1, 3, 4]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BySample(fs.FedAvg):
    """Uploads a row for each sample, which no server can expect."""

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        return {"params": local["params"], "logits": task.local_logits(local["params"])}, memory


def test_where_no_upload_ever_has_the_right_form_the_run_stops_with_the_reason() -> None:
    with pytest.raises(
        fs.TrainingError, match=r"round 1: no upload has ever had the right form; client \d: logits has shape"
    ):
        run(BySample())


def test_a_round_with_too_few_uploads_is_marked_without_simulated_time_too() -> None:
    def change(reply: Reply) -> Reply:
        spoilt = reply.kind == "train" and reply.client == 0 and reply.round == 2
        return dataclasses.replace(reply, up=fs.tree.map(lambda t: t * torch.nan, reply.up)) if spoilt else reply

    result = trained(fs.FedAvg(), change, minimum=5)
    assert [bool(record.get("abandoned")) for record in result.history] == [False, True, False]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(fs.FedAvg):
    """Counts at the client what the server has merged of it."""

    coupled: ClassVar[frozenset[str]] = frozenset({"count"})

    def init_client(self, task: Task, params: Params) -> Tree:
        return {"count": torch.zeros((), dtype=torch.float64)}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        return {"params": local["params"]}, {"count": memory["count"] + 1}


@pytest.mark.parametrize(
    "mode", [{"mode": "fedasync"}, {"mode": "fedbuff", "buffer": 2}, {}], ids=["async", "buff", "sync"]
)
def test_rejected_replies_are_rolled_back_in_every_mode(mode: dict) -> None:
    def change(reply: Reply) -> Reply:
        spoilt = reply.kind == "train" and reply.client in (0, 3) and reply.round % 2
        return dataclasses.replace(reply, up=fs.tree.map(lambda t: t * torch.inf, reply.up)) if spoilt else reply

    result = trained(Counting(), change, profile="lognormal:1", participation=0.6, rounds=16, eval_every=16, **mode)
    merged = [sum(k in record["participants"] for record in result.history) for k in range(5)]
    assert any(record.get("rejected") for record in result.history)
    assert [int(result.memory(k)["count"]) for k in range(5)] == merged
    for record in result.history:
        assert not set(map(int, record.get("rejected", ()))) & {*record["participants"], *record["folded"]}


@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
def test_forgetting_is_watched_after_a_resume_too(mode: str, tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=fs.PFedSD(), rounds=12, clients=6, epochs=1, partition="iid", profile="lognormal:1", mode=mode, forgetting=True,
        checkpoint_every=2, eval_every=6, batch_size=64, **({"buffer": 2} if mode == "fedbuff" else {}),
    )  # fmt: skip
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=7)
    assert rows(whole.history) == rows(resumed.history)


def test_a_client_that_does_not_answer_is_named() -> None:
    result = trained(fs.PFedSD(), lambda reply: None if (reply.kind, reply.client) == ("model", 3) else reply)
    assert result.personal(2)
    with pytest.raises(fs.TrainingError, match="client 3 did not answer"):
        result.personal(3)
    lost = trained(fs.PFedSD(), lambda reply: None if reply.kind == "state" else reply)
    assert "did not answer" in lost.without_data().cost.uncounted


@pytest.mark.parametrize("hook", ["merge", "send", "personal", "generic", "init_client", "init_server"])
def test_a_mistake_in_a_hook_is_named_wherever_it_runs(hook: str) -> None:
    def mistaken(self, *arguments):
        return {}["nope"]

    method = dataclasses.dataclass(frozen=True, kw_only=True)(
        type("Mistaken", (fs.PFedSD,), {hook: mistaken, "__annotations__": {}})
    )
    with pytest.raises(fs.TrainingError, match=rf"Mistaken\.{hook}\(\) at .*KeyError"):
        run(method())
