"""A site that is killed within a round goes on with it: the same bytes, and at most one epoch is done again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.method import Upload
from fedstill.data import Federation
from fedstill.deploy.data import SiteData
from fedstill.deploy.savepoint import SaveEvery, Savepoint, pack, unpack
from fedstill.deploy.site import SiteClient
from fedstill.deploy.state_files import read_saved
from fedstill.engine import fused, nested
from fedstill.engine.progress import Halfway
from fedstill.engine.step import Step
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.prepare import from_experiment
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

from ..problems import needed

HELD: dict[str, Any] = {
    "rounds": 3, "epochs": 3, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3,
    "device": "cpu", "engine": "one",
}  # fmt: skip
SAMPLES = 30  # of the client: four steps an epoch, the last one partial
EPOCH = 4


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


class Life:
    """Counts the steps that a process takes, and kills it where it should die."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.left = 0, -1
        loops = ((loop, "step") for loop in (fused.Loop, *nested.LOOPS.values()))
        for owner, name in ((Step, "gradient"), (Step, "own"), *loops):
            plain = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *given, plain=plain: self.step() or plain(*given))

    def step(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1
        self.steps += 1


def federation(shape: tuple[int, ...] = (6,)) -> Federation:
    rng = np.random.default_rng(0)
    clients = []
    for _ in range(3):
        y = np.arange(SAMPLES + 6) % 4
        x = rng.normal(size=(len(y), *shape)).astype(np.float32) + y.reshape(-1, *[1] * len(shape))
        clients.append((x[:-6], y[:-6], x[-6:], y[-6:]))
    return Federation.from_arrays(clients, classes=4)


class Site:
    """Client 0 of a run, whose hub is this test."""

    def __init__(self, folder: Path, experiment: Experiment, shape: tuple[int, ...], often: SaveEvery) -> None:
        self.folder, self.experiment, self.often = folder, experiment, often
        self.federation = federation(shape)
        self.lines: list[str] = []

    def site_client(self) -> SiteClient:
        """Another process of the site."""
        own = SiteData(self.federation.clients[0], self.federation.classes)
        site_client = SiteClient(self.folder, own, device="cpu", often=self.often, log=self.lines.append)
        about = {"run": "r1", "attempt": 1, "round": 0, "client": 0, "clients": 3, "classes": 4}
        site_client.open({**about, "experiment": self.experiment.to_toml()})
        return site_client

    def second_round(self) -> bytes:
        """Do the first round; return the order of the second."""
        sim, _ = from_experiment(self.experiment, self.federation)
        method, task = sim.method, dataclasses.replace(sim.task, round=1)
        server = method.init_server(task, sim.initial)
        down = method.send(task, server, 0)
        reply = wire.decode(self.site_client().handle(wire.encode(Order("train", 1, 0, down, id=7))), Reply)
        assert not reply.refusal, reply.refusal
        server = method.merge(task, server, [Upload(reply.up, float(SAMPLES), 0, down)])
        down = method.send(dataclasses.replace(task, round=2), server, 0)
        return wire.encode(Order("train", 2, 0, down, decided=1, taken=1, id=8))


def kept_at(site: Site) -> dict[str, Any]:
    """What a site keeps of its client, as numbers."""
    kept = read_saved(site.folder / "r1" / "state.bin")
    assert kept is not None
    reply = wire.decode(kept[1], Reply)
    return {**{name: leaf.numpy().tobytes() for name, leaf in tree.leaves(reply.up)}, **reply.report}


def check_kills(
    life: Life,
    tmp_path: Path,
    experiment: Experiment,
    every: int,
    shape: tuple[int, ...] = (6,),
    often: SaveEvery | None = None,
) -> tuple[int, int]:
    """Kill a site whenever it has made so many steps: it comes to the same bytes. Return the steps without kills and with."""
    often = often or SaveEvery(epochs=1)
    calm, killed = (Site(tmp_path / name, experiment, shape, often) for name in ("calm", "killed"))
    order = calm.second_round()
    assert killed.second_round() == order
    site_client, life.steps = calm.site_client(), 0  # opening a run tries the model, which takes steps, too
    answer = site_client.handle(order)
    whole, made, lives = life.steps, 0, 0
    state = kept_at(calm)
    while True:
        site_client = killed.site_client()
        life.left, life.steps = every, 0
        try:
            assert site_client.handle(order) == answer
            break
        except Killed:
            lives += 1
            assert lives < whole, "it never ends"
        finally:
            life.left, made = -1, made + life.steps
    assert lives
    assert kept_at(killed) == state
    assert not (killed.folder / "r1" / "half.bin").exists()
    # every life but the last took `every` steps; what it took beyond its last whole epoch is done again
    assert whole <= made < whole + lives * EPOCH
    return whole, made


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_goes_on_to_the_same_bytes(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(monkeypatch)
    check_kills(
        life, tmp_path, Experiment(method=METHODS[method](), **HELD, **needed(METHODS[method]())), 2 * EPOCH - 1
    )


CONVOLVED: dict[str, Any] = {"model": "resnet8", "epochs": 2, "rounds": 2}


@pytest.mark.parametrize("method", ["fedbn", "pfedsd"])
def test_convolutions_and_statistics_go_on_too(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of convolutions are laid out otherwise while they are trained, and BatchNorm's statistics move."""
    experiment = Experiment(method=METHODS[method](), **{**HELD, **CONVOLVED})
    check_kills(Life(monkeypatch), tmp_path, experiment, EPOCH + 1, (3, 8, 8))


@pytest.mark.parametrize("method", ["pfedsd", "pfedme", "fedavg"])
def test_within_an_epoch_where_it_is_kept_by_steps(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(monkeypatch)
    experiment = Experiment(method=METHODS[method](), **{**HELD, "fast": False})
    whole, made = check_kills(life, tmp_path, experiment, 3, often=SaveEvery(steps=2))
    assert made - whole <= (made // 3) * 2  # of three steps at most two are done again
    assert made < 3 * whole


def test_another_order_or_version_and_a_damaged_file_are_not_gone_on_with(tmp_path: Path) -> None:
    lines: list[str] = []
    about, device = {"attempt": 1, "order": 5, "round": 2}, torch.device("cpu")

    def savepoint(**changed: int) -> Savepoint:
        return Savepoint(tmp_path / "half.bin", {**about, **changed}, device, SaveEvery(epochs=1), lines.append)

    assert savepoint().load() is None
    savepoint().save(Halfway(1, 4, {"local": {"params": {"w": torch.ones(3)}}, "total": torch.tensor(2.0)}))
    kept = savepoint().load()
    assert kept is not None
    assert (kept.phase, kept.step, float(kept.state["total"])) == (1, 4, 2.0)
    for changed in ({"order": 6}, {"attempt": 2}):
        assert savepoint(**changed).load() is None
    lines.clear()
    data = bytearray((tmp_path / "half.bin").read_bytes())
    for at in (3, 60, len(data) - 2):
        data[at] ^= 1
        (tmp_path / "half.bin").write_bytes(data)
        assert savepoint().load() is None
        data[at] ^= 1
    assert [line.count("damaged") for line in lines] == [1, 1, 1]
    other = savepoint()
    other.about["version"] = "0.0.0"
    (tmp_path / "half.bin").write_bytes(data)
    assert other.load() is None


def test_a_damaged_savepoint_has_the_round_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(monkeypatch)
    site = Site(tmp_path / "a", Experiment(method=fs.PFedSD(), **HELD), (6,), SaveEvery(epochs=1))
    order, client = site.second_round(), site.site_client()
    life.left = EPOCH + 1
    with pytest.raises(Killed):
        client.handle(order)
    (file,) = site.folder.rglob("half.bin")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    life.left = -1
    again = site.site_client()
    life.steps = 0
    reply = wire.decode(again.handle(order), Reply)
    assert life.steps == 3 * EPOCH
    assert reply.report["steps"] == 3 * EPOCH
    assert any("damaged" in line for line in site.lines)


def test_by_itself_it_is_kept_when_that_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedstill.deploy.savepoint.time.monotonic", lambda: now)
    savepoint = Savepoint(tmp_path / "half.bin", {"round": 1}, torch.device("cpu"), SaveEvery(), print)
    assert not savepoint.due(0, 4, True)  # training has hardly begun
    now += 1.0
    assert not savepoint.due(0, 5, False)  # within an epoch
    assert savepoint.due(0, 8, True)

    def slow(*given: Any) -> None:
        nonlocal now
        now += 2.0

    monkeypatch.setattr("fedstill.deploy.savepoint.write_saved", slow)
    savepoint.save(Halfway(0, 8, {"total": torch.zeros(())}))
    now += 39.0  # two seconds are a twentieth of forty
    assert not savepoint.due(0, 12, True)
    now += 1.5
    assert savepoint.due(0, 16, True)


def test_tensors_come_back_laid_out_as_they_were() -> None:
    wide = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "a": {"x": wide, "t": torch.arange(6).reshape(2, 3).t()},
        "b": torch.tensor(3),
        "e": torch.ones(1).expand(4),
        "n": {},
    }
    data, strides = pack(state)
    again = unpack(data, tree.outline(state), strides, "cpu")
    assert tree.outline(again) == tree.outline(state)
    for (name, one), (_, two) in zip(tree.leaves(state), tree.leaves(again), strict=True):
        assert torch.equal(one, two)
        assert one.dtype == two.dtype
        assert name == "e" or one.stride() == two.stride()
