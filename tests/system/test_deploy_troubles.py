"""A deployment of real processes in trouble: killed within a round, slow, refusing, cut off, lied to, commanded."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedstill.core.errors import TrainingError
from fedstill.data import Federation
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment

if importlib.util.find_spec("nvflare") is None:
    if os.environ.get("FEDSTILL_NO_SKIP"):
        raise ImportError("the extra deploy is not installed: pip install 'fedstill[deploy]'")
    pytest.skip("the extra deploy (nvflare) is not installed", allow_module_level=True)

from fedstill.deploy import demo, jobs, process
from fedstill.deploy.privacy_log import PRIVACY_LOG
from fedstill.deploy.process import Settings
from fedstill.deploy.state_files import read_saved
from fedstill.transport import wire
from fedstill.transport.messages import Reply

from .test_deploy import HELD, NAMES, data, kill, log_of, server

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
troubles = importlib.import_module("deploy_troubles")

ROGUE = Path(__file__).with_name("rogue.py")
LONG: dict[str, Any] = {"rounds": 3, "epochs": 250, "batch_size": 2, "fast": False, "lr": 0.002}  # seconds a round
CHARGE = "fedstill-charge"  # the file that says how full the battery is
BATTERY = f"""
try:
    import collections, os, pathlib, psutil
    charge = collections.namedtuple("charge", "percent power_plugged")
    file = pathlib.Path(os.environ["{CHARGE.upper().replace("-", "_")}"])
    psutil.sensors_battery = lambda: charge(float(file.read_text()), False)
except (ImportError, KeyError):
    pass
"""


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[demo.Party]:
    """Three sites. The machine of a has a battery, as psutil tells, and a keeps its rounds after every epoch."""
    folder = tmp_path_factory.mktemp("battery")
    (folder / "sitecustomize.py").write_text(BATTERY)
    (folder / CHARGE).write_text("90")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHARGE.upper().replace("-", "_"), str(folder / CHARGE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        plain = Settings.write

        def write(self: Settings, site: Path) -> None:
            if site.name == "a":
                self = Settings(**{**vars(self), "monitor": "battery>20,load<1,memory>0", "save_every_epochs": 1})
            plain(self, site)

        patch.setattr(Settings, "write", write)
        with demo.party(data(folder), NAMES) as made:
            made.charge = folder / CHARGE  # type: ignore[attr-defined]
            yield made


def submit(party: demo.Party, method: str = "pfedsd", names: Any = NAMES, **changed: Any) -> Path:
    job = {name: changed.pop(name) for name in ("deadline", "audit") if name in changed}
    return jobs.submit(party.hub, Experiment(method=METHODS[method](), **{**HELD, **changed}), names, **job)


def follow(party: demo.Party, job: Path, never: str = "") -> list[dict[str, Any]]:
    """A run's records once it is over. Where the site `never` never counted, that is how it ends."""
    history: list[dict[str, Any]] = []
    told = contextlib.nullcontext()
    if never:
        told = pytest.raises(TrainingError, match=f"^the run is over, but these sites never counted: {never}$")  # type: ignore[assignment]
    with told:
        history.extend(jobs.follow(job, lambda: bool(process.running(party.hub.folder))))
    return history


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"nothing in {seconds:.0f} s"
        time.sleep(0.02)
    return found


def rounds_of(job: Path) -> int:
    outcome = job / jobs.OUTCOME
    assert not outcome.exists() or json.loads(outcome.read_text())["ok"], outcome.read_text()
    metrics = job / jobs.RUN / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def run_of(party: demo.Party, job: Path, name: str) -> Path:
    """The folder of a run at a site."""
    file = job / "run" / "deployment.json"
    wait_for(file.exists)
    return Path(party.site(name)) / "runs" / str(json.loads(file.read_text())["run"])


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def refusals(party: demo.Party, site: str) -> list[str]:
    status = json.loads((party.hub.folder / jobs.STATUS).read_text())
    return [r["reason"] for r in status["refused"] if r["site"] == site]


# ---- killed within a round -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def undisturbed(party: demo.Party) -> tuple[Path, list[dict[str, Any]]]:
    job = submit(party, "scaffold", **LONG)
    return job, follow(party, job)


def half_done(folder: Path, round: int) -> tuple[int, int] | None:
    """Which phase and step of a round a site has kept."""
    kept = read_saved(folder / "half.bin")
    return (kept[0]["phase"], kept[0]["step"]) if kept is not None and kept[0]["round"] == round else None


def test_a_worker_killed_within_an_epoch_goes_on_from_the_last(
    party: demo.Party, undisturbed: tuple[Path, list[dict[str, Any]]]
) -> None:
    before, history = undisturbed
    job = submit(party, "scaffold", **LONG)
    folder = run_of(party, job, "a")
    step = 0
    while step < 20:  # some way into the second round
        _, step = wait_for(lambda: half_done(folder, 2))
    kill(party.site("a"))
    began = time.monotonic()
    (said,) = wait_for(lambda: re.findall(r"round 2: goes on after step (\d+) of phase 1", log_of(party.site("a"))))
    assert time.monotonic() - began < 60
    assert int(said) >= step
    assert int(said) % 16 == 0  # 32 samples by 2: a whole epoch
    again = follow(party, job)
    assert same(server(before), server(job))
    for name in NAMES:
        models = [load_file(run_of(party, each, name) / "personal.safetensors") for each in (before, job)]
        assert same(*models)
    assert [r["participants"] for r in again] == [[0, 1, 2]] * 3
    for number in ("personal_clients", "steps", "loss"):
        assert [r[number] for r in again] == [r[number] for r in history]


def test_a_whole_site_killed_within_a_round_misses_it_and_is_back_with_its_model(party: demo.Party) -> None:
    job = submit(party, **{**LONG, "rounds": 8, "epochs": 60}, deadline=5.0)
    wait_for(lambda: rounds_of(job) >= 1)
    folder = run_of(party, job, "a")
    wait_for(lambda: half_done(folder, 2))
    keeper_of = process.running(party.site("a"))
    os.kill(keeper_of, signal.SIGKILL)
    party.keepers["a"].wait(10)
    began = time.monotonic()
    kept = load_file(folder / "personal.safetensors")
    state = read_saved(folder / "state.bin")
    assert state is not None
    memory = wire.decode(state[1], Reply).up["memory"]["v"]
    assert same(kept, memory)  # what it had come to in round 1
    wait_for(lambda: rounds_of(job) >= 2)
    party.start("a")
    party.wait("a")
    back = time.monotonic() - began
    assert same(kept, load_file(folder / "personal.safetensors"))
    history = follow(party, job)
    assert back < 60
    took = [record["participants"] for record in history]
    assert took[0] == [0, 1, 2]
    assert took[1] == [1, 2]
    assert history[1]["missing"] == [0]
    assert history[1]["seconds"] < 3 * 5 + 5
    assert took[-1] == [0, 1, 2]


# ---- slow, refusing, cut off -----------------------------------------------------------------------------------------
def test_a_slow_site_is_missed_at_a_deadline_and_counts_without_one(party: demo.Party) -> None:
    work = {**LONG, "epochs": 160, "rounds": 2}
    with troubles.slowed(troubles.process_of(party.site("c")), 20):
        cut = follow(party, submit(party, **work, deadline=6.0), never="c")
        whole = follow(party, submit(party, **{**work, "epochs": 15}))
    assert [r["participants"] for r in cut] == [[0, 1]] * 2
    assert [r["missing"] for r in cut] == [[2]] * 2
    assert [r["participants"] for r in whole] == [[0, 1, 2]] * 2


def test_a_site_with_a_flat_battery_refuses_by_itself_and_works_again_when_it_is_charged(party: demo.Party) -> None:
    party.charge.write_text("5")  # type: ignore[attr-defined]
    try:
        history = follow(party, submit(party, rounds=2), never="a")
    finally:
        charge = party.charge.write_text("80")  # type: ignore[attr-defined]
    assert charge
    assert [r["participants"] for r in history] == [[1, 2]] * 2
    assert [r["refused"] for r in history] == [[0]] * 2
    time.sleep(1.2)  # the hub writes its status every second
    assert any("battery at 5%, below 20%" in reason for reason in refusals(party, "a"))
    assert follow(party, submit(party, rounds=1))[0]["participants"] == [0, 1, 2]


def test_a_network_that_is_cut_for_a_while_loses_nothing(party: demo.Party) -> None:
    proxy = troubles.Proxy(party.hub.port)
    troubles.joined(party, "p", proxy.port, "c")
    try:
        work = {**LONG, "epochs": 60}
        before, job = submit(party, names=("a", "b", "c"), **work), None
        follow(party, before)
        job = submit(party, names=("a", "b", "p"), **work)
        wait_for(lambda: rounds_of(job) >= 1)
        proxy.cut()
        time.sleep(0.5)
        held = rounds_of(job)
        time.sleep(8)
        assert rounds_of(job) == held < 3  # it is waited for
        proxy.heal()
        history = follow(party, job)
        assert [r["participants"] for r in history] == [[0, 1, 2]] * 3
        assert same(server(before), server(job))
    finally:
        process.stop(party.site("p"))
        proxy.close()


# ---- lied to and commanded -------------------------------------------------------------------------------------------
@pytest.fixture
def rogue(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have what is started next do what it should not."""

    def be(how: str) -> None:
        command = lambda kind, folder: [sys.executable, str(ROGUE), how, kind, str(folder.absolute())]  # noqa: E731
        monkeypatch.setattr(process, "_command", command)

    return be


def test_what_a_site_should_not_send_is_refused_and_the_others_are_unaffected(party: demo.Party, rogue: Any) -> None:
    rogue("lies")
    troubles.joined(party, "q", party.hub.port, "c")
    try:
        history = follow(party, submit(party, names=("a", "b", "q"), rounds=4))
        time.sleep(1.2)
    finally:
        process.stop(party.site("q"))
    assert [r["participants"] for r in history] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert "no reply" in history[0]["rejected"]["2"]
    assert "more than" in history[1]["rejected"]["2"]
    told = refusals(party, "q")
    for part in ("bytes that are no reply", "more than", "twice", "bytes that are no message"):
        assert any(part in reason for reason in told), (part, told)
    assert follow(party, submit(party, rounds=1))[0]["participants"] == [0, 1, 2]


def test_a_site_of_another_version_is_refused_in_one_line(party: demo.Party, rogue: Any) -> None:
    rogue("version")
    with pytest.raises(Exception, match=r"the hub has fedstill .*, this site 0\.0\.9: install the same"):
        troubles.joined(party, "r", party.hub.port, "c")
    assert process.running(party.site("r")) == 0


def test_a_site_takes_no_job_and_no_code_of_its_hub(tmp_path: Path, rogue: Any) -> None:
    (tmp_path / "silos").mkdir()
    whole = data(tmp_path / "silos")
    made = demo.found(tmp_path / "party", Federation(whole.clients[:1], whole.classes, "", ""), ("a",))
    try:
        with pytest.MonkeyPatch.context() as patch:
            command = process._command
            rogue("commands")
            commanding = process._command
            patch.setattr(
                process, "_command", lambda kind, folder: (commanding if kind == "hub" else command)(kind, folder)
            )
            made.start()
            made.wait("hub")
            made.start("a")
            made.wait("a")
        (made.hub.folder / "go").touch()
        told = wait_for(lambda: (made.hub.folder / "told").exists() and (made.hub.folder / "told").read_text())
        said = log_of(made.site("a"))
    finally:
        made.stop()
    assert told.count("a site takes fedstill's orders, no job and no code") == 3, told
    assert said.count("refused 'train.deploy' of the hub") == 1
    assert not list(tmp_path.rglob("ran"))
    assert not list(tmp_path.rglob("evil.py"))


# ---- privacy and state at the server ---------------------------------------------------------------------------------
def test_noise_is_drawn_at_sites_and_a_kill_does_not_draw_it_again(party: demo.Party) -> None:
    settings = {"privacy": "local", "batch_size": 8, "privacy_delta": 1e-3, "momentum": 0.0, "epochs": 8, "rounds": 3}
    job = submit(party, "pfedsd", **settings, audit=True)
    wait_for(lambda: rounds_of(job) >= 1)
    kill(party.site("b"))
    history = follow(party, job)
    assert [r["participants"] for r in history] == [[0, 1, 2]] * 3
    for k, name in enumerate(NAMES):
        lines = [json.loads(line) for line in (run_of(party, job, name) / PRIVACY_LOG).read_text().splitlines()]
        works = [line for line in lines if line["what"] == "work"]
        assert [line["round"] for line in works] == [1, 2, 3]
        assert works[-1]["epsilon"] == history[-1]["epsilon_clients"][str(k)]
    assert len({(party.folder / name / "secret.key").read_bytes() for name in (*NAMES, "hub")}) == 4
