"""The edge by hand: what a client commits, what it rolls back, and what travels for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.edge.edge import Edge
from fedstill.engine.bench import Bench, Work
from fedstill.engine.stacked import Stacked
from fedstill.run.callbacks import as_tree
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.run.session import Session, Start, start
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

from ..problems import SETTINGS, identical, make, ragged

COUPLED = [method() for method in fs.METHODS.values() if method.coupled]
coupled = pytest.mark.parametrize("method", COUPLED, ids=lambda m: m.id)
engines = pytest.mark.parametrize("engine", ["one", "stacked"])


class Hand:
    """An edge, and the server's side of its orders by hand."""

    def __init__(self, method: fs.Method, engine: str = "one", **changes) -> None:
        training = Training(**{**SETTINGS, "engine": engine, "rounds": 5, **changes})
        self.session: Session = start([Start(prepare(method, make("normed"), ragged(), None, training))])
        (self.coordinator,) = self.session.coordinators
        self.edge: Edge = self.session.driver.transport.edge

    def order(self, kind: str, round: int, client: int, settled: int = 0, taken: bool = True, **options) -> Order:
        task = dataclasses.replace(self.coordinator.task, round=round)
        order = self.coordinator.order(kind, task, client, **options)
        return dataclasses.replace(order, decided=settled, taken=settled if taken else 0)

    def train(self, round: int, client: int, settled: int = 0, taken: bool = True) -> Reply:
        (reply,) = self.edge.handle([self.order("train", round, client, settled, taken)])
        return reply

    def state(self, client: int, settled: int = 0, taken: bool = True) -> Reply:
        (reply,) = self.edge.handle([self.order("state", 1, client, settled, taken, down={})])
        return reply

    def settle(self, client: int, settled: int, taken: bool) -> None:
        """By an order that does nothing else: the client's model is asked for."""
        generic = self.session.starts[0].simulation.initial
        list(self.edge.handle([self.order("model", 1, client, settled, taken, generic=generic)]))

    def memory(self, client: int) -> Tree:
        return tree.clone(self.edge.store.get(client))

    def kept(self, client: int) -> tuple[Tree, int]:
        return self.memory(client), self.edge.last.get(client, 0)


def same(a: Tree, b: Tree) -> bool:
    return identical({"": tree.flatten(a)}, {"": tree.flatten(b)})


def moved_on(fresh: Hand, old: Hand, clients: Sequence[int], wired: bool) -> None:
    """Carry clients' states to an edge that knows nothing, as a checkpoint does."""
    for k in clients:
        order = fresh.order("restore", 1, k, down=as_tree(old.state(k)))
        list(fresh.edge.handle([wire.decode(wire.encode(order), Order) if wired else order]))


# ---- commit and rollback ---------------------------------------------------------------------------------------------
@engines
@coupled
def test_a_reply_that_was_taken_is_committed(method: fs.Method, engine: str) -> None:
    hand = Hand(method, engine)
    before = hand.memory(0)
    hand.train(1, 0)
    after = hand.memory(0)
    assert not same(before, after)
    hand.settle(0, settled=1, taken=True)
    assert same(hand.memory(0), after)
    assert hand.edge.last[0] == 1
    assert not hand.edge.undecided
    hand.settle(0, settled=1, taken=False)  # it has been decided
    assert same(hand.memory(0), after)


@engines
@coupled
def test_a_reply_that_was_not_taken_is_rolled_back(method: fs.Method, engine: str) -> None:
    hand = Hand(method, engine)
    before = [hand.kept(k) for k in range(5)]
    hand.train(1, 0)
    hand.train(1, 3)
    others = [hand.kept(k) for k in (1, 2, 3, 4)]
    hand.settle(0, settled=1, taken=False)
    (memory, last), (old, was) = hand.kept(0), before[0]
    assert (last, was) == (0, 0)
    assert all(same({"": memory[name]}, {"": old[name]}) for name in method.coupled)
    for k, (memory, last) in zip((1, 2, 3, 4), others, strict=True):  # nobody else's
        assert same(hand.memory(k), memory)
        assert hand.edge.last.get(k, 0) == last
    assert list(hand.edge.undecided) == [3]


@coupled
def test_the_second_training_is_rolled_back_to_the_first(method: fs.Method) -> None:
    hand = Hand(method)
    hand.train(1, 2)
    first, _ = hand.kept(2)
    hand.train(3, 2, settled=1, taken=True)
    hand.settle(2, settled=3, taken=False)
    memory, last = hand.kept(2)
    assert last == 1
    assert all(same({"": memory[name]}, {"": first[name]}) for name in method.coupled)


@coupled
def test_the_order_to_train_itself_says_what_counted_before(method: fs.Method) -> None:
    """Trained again after a rollback, the client uploads what it would have uploaded at first."""
    hand, fresh = Hand(method), Hand(method)
    hand.train(1, 2)
    ours, theirs = hand.train(2, 2, settled=1, taken=False), fresh.train(2, 2)
    assert same(ours.up, theirs.up)
    assert same(hand.memory(2), fresh.memory(2))
    kept = Hand(method)
    kept.train(1, 2)
    assert not same(kept.train(2, 2, settled=1, taken=True).up, theirs.up)


@coupled
def test_nothing_is_decided_before_its_time(method: fs.Method) -> None:
    hand = Hand(method)
    hand.train(2, 0)
    after = hand.memory(0)
    hand.settle(0, settled=1, taken=False)  # of a round before: late replies may still be folded in
    assert same(hand.memory(0), after)
    assert 0 in hand.edge.undecided


@coupled
def test_a_reply_that_the_server_never_saw_is_rolled_back(method: fs.Method) -> None:
    """The server has decided a later round: that it took the reply of then says nothing of this one."""
    hand = Hand(method)
    before = hand.memory(0)
    hand.train(1, 0)
    hand.settle(0, settled=2, taken=True)
    assert all(same({"": hand.memory(0)[name]}, {"": before[name]}) for name in method.coupled)
    assert hand.edge.last.get(0, 0) == 0


def test_what_is_the_clients_own_stays() -> None:
    """pFedSD's v_k depends on nothing at the server: a late reply's training is kept."""
    hand = Hand(fs.PFedSD())
    hand.train(1, 0)
    after = hand.memory(0)
    hand.settle(0, settled=1, taken=False)
    assert same(hand.memory(0), after)
    assert hand.edge.last[0] == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Both(fs.SCAFFOLD):
    """SCAFFOLD whose clients also keep what they trained."""

    coupled = frozenset({"c"})

    def init_client(self, task, params):
        return {**super().init_client(task, params), "own": params}

    def finish(self, task, down, memory, local):
        up, kept = super().finish(task, down, memory, local)
        return up, {**kept, "own": local["params"]}


def test_of_both_kinds_each_is_treated_as_it_is() -> None:
    hand = Hand(Both())
    before = hand.memory(0)
    hand.train(1, 0)
    after = hand.memory(0)
    hand.settle(0, settled=1, taken=False)
    memory = hand.memory(0)
    assert same(memory["c"], before["c"])
    assert same(memory["own"], after["own"])
    assert not same(before["own"], after["own"])


# ---- state and restore -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("taken", [False, True])
@coupled
def test_a_round_trip_in_between_changes_nothing(method: fs.Method, taken: bool, wired: bool) -> None:
    old, fresh = Hand(method), Hand(method)
    for k in (0, 2):
        old.train(1, k)
    moved_on(fresh, old, range(5), wired)
    assert fresh.edge.undecided.keys() == old.edge.undecided.keys() == {0, 2}
    for hand in (old, fresh):
        hand.settle(0, settled=1, taken=taken)
    for k in range(5):
        assert same(fresh.memory(k), old.memory(k))
        assert fresh.edge.last.get(k, 0) == old.edge.last.get(k, 0) == (1 if k == 2 or (k == 0 and taken) else 0)
    for k in (0, 2):
        ours, theirs = (hand.train(2, k, settled=1, taken=taken) for hand in (fresh, old))
        assert same(ours.up, theirs.up)
        assert same(fresh.memory(k), old.memory(k))


def test_the_state_of_one_that_has_begun_nothing_is_empty() -> None:
    hand, fresh = Hand(fs.PFedSD()), Hand(fs.PFedSD())
    reply = hand.state(4)
    assert (reply.up, reply.report) == ({}, {"last": 0.0})
    moved_on(fresh, hand, [4], wired=True)
    assert not fresh.edge.changed
    assert not fresh.edge.last


def test_a_state_carries_the_decision_that_comes_with_its_order() -> None:
    hand = Hand(fs.SCAFFOLD())
    before = hand.memory(0)
    hand.train(1, 0)
    reply = hand.state(0, settled=1, taken=False)
    assert same(reply.up["memory"], before)
    assert reply.report == {"last": 0.0}


def test_personal_work_that_waits_is_part_of_the_state() -> None:
    timed = {"profile": "uniform", "wait_free": "until-download", "participation": 1.0}
    old, fresh = Hand(fs.Ditto(), **timed), Hand(fs.Ditto(), **timed)
    for order in (old.order("train", 1, 0, work="generic"), old.order("begin", 1, 3)):
        list(old.edge.handle([order]))
    moved_on(fresh, old, range(5), wired=True)
    assert fresh.edge.begun.keys() == {0, 3}
    for k in (0, 3):
        ours, theirs = (next(iter(h.edge.handle([h.order("idle", 1, k, down={}, steps=3)]))) for h in (fresh, old))
        assert ours.report == theirs.report
        assert same(fresh.memory(k), old.memory(k))
        assert not same(fresh.memory(k), Hand(fs.Ditto(), **timed).memory(k))


# ---- answers ---------------------------------------------------------------------------------------------------------
class Picky:
    """A monitor by which some clients refuse."""

    def refusal(self, round: int, client: int) -> str | None:
        return "no battery" if client in (1, 3) else None


def test_who_refuses_says_why_and_learns_what_counted() -> None:
    hand = Hand(fs.SCAFFOLD())
    before = hand.memory(1)
    hand.train(1, 1)
    hand.edge.monitors = [Picky()]
    orders = [hand.order("train", 2, k, settled=1, taken=False) for k in range(4)]
    replies = list(hand.edge.handle(orders))
    assert [(r.client, r.refusal) for r in replies] == [(1, "no battery"), (3, "no battery"), (0, ""), (2, "")]
    assert all(not r.up and not r.report for r in replies[:2])
    assert same(hand.memory(1), before)
    (scored,) = hand.edge.handle([hand.order("score", 2, 1, generic=hand.session.starts[0].simulation.initial)])
    assert not scored.refusal  # only training is refused


def test_orders_of_all_kinds_in_one_go_come_back_group_by_group() -> None:
    hand = Hand(fs.PFedSD())
    mixed = [
        hand.order("model", 1, 0),
        hand.order("train", 1, 2),
        hand.order("model", 1, 1),
        hand.order("train", 1, 0),
        hand.order("state", 1, 4, down={}),
    ]
    replies: Iterator[Reply] = hand.edge.handle(mixed)
    assert [(r.kind, r.client) for r in replies] == [
        ("model", 0),
        ("model", 1),
        ("train", 2),
        ("train", 0),
        ("state", 4),
    ]


@engines
def test_tuning_and_idle_work_that_is_not_kept_leave_memories_alone(engine: str) -> None:
    hand = Hand(fs.Ditto(), engine, profile="uniform", wait_free="until-download", participation=1.0)
    list(hand.edge.handle([hand.order("train", 1, 0, work="generic")]))
    before = [hand.kept(k) for k in range(5)]
    generic = hand.session.starts[0].simulation.initial
    list(hand.edge.handle([hand.order("idle", 1, 0, down={}, steps=3, keep=False)]))
    list(hand.edge.handle([hand.order("tune", 1, k, generic=generic, epochs=2) for k in (0, 1)]))
    for k, (memory, last) in enumerate(before):
        assert same(hand.memory(k), memory)
        assert hand.edge.last.get(k, 0) == last
    (model,) = hand.edge.handle([hand.order("model", 1, 0, generic=generic)])
    assert not same(model.up["params"], hand.edge.store.get(0)["v"])  # served is the copy, as it would be now
    assert torch.is_tensor(next(iter(model.up["params"].values())))


@pytest.mark.parametrize("fits", [1, 2, 100])
def test_personal_models_that_take_gradients_are_made_for_all_clients_at_once(
    fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked, or in groups that fit into a GPU's memory: the scores of one client at a time."""
    method = fs.PerFedAvg(alpha=0.05, adapt_steps=2)
    sizes: list[int] = []
    original = Stacked.personals

    def personals(engine: Stacked, bench: Bench, round: int, works: Sequence[Work]) -> list[Params]:
        if len(works) > fits:
            raise torch.cuda.OutOfMemoryError
        sizes.append(len(works))
        return original(engine, bench, round, works)

    monkeypatch.setattr(Stacked, "personals", personals)
    one, stacked = Hand(method), Hand(method, "stacked", cohort=0 if fits > 1 else 2)
    clients = range(len(ragged()))
    assert len({len(client.y_train) for client in ragged().clients}) > 1
    scores = {}
    for hand in (one, stacked):
        hand.train(1, 0)
        orders = [hand.order("score", 2, client, generic=None, split="train") for client in clients]
        scores[hand] = [reply.report for reply in hand.edge.handle(orders)]
    assert sum(sizes) == len(clients)
    assert len(sizes) == -(-len(clients) // min(fits, len(clients)))
    for mine, right in zip(scores[stacked], scores[one], strict=True):
        assert mine["personal"] == right["personal"]
        assert mine["personal_loss"] == pytest.approx(right["personal_loss"], rel=1e-12)
    assert len({report["personal_loss"] for report in scores[one]}) == len(clients)  # each has a model of its own


def test_a_method_that_overrides_personal_says_again_that_it_takes_gradients() -> None:
    class Other(fs.PerFedAvg):
        def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
            return down["params"]

    assert fs.PerFedAvg.personal_gradients
    assert not Other.personal_gradients
