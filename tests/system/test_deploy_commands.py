"""The commands hub and site, as two people at two machines would use them (here: two folders of one)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.cli import main

if importlib.util.find_spec("nvflare") is None:
    if os.environ.get("FEDSTILL_NO_SKIP"):
        raise ImportError("the extra deploy is not installed: pip install 'fedstill[deploy]'")
    pytest.skip("the extra deploy (nvflare) is not installed", allow_module_level=True)

from fedstill.deploy import demo, process
from fedstill.deploy.folders import Hub, Site


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    for folder in ("hub", "one"):
        process.stop(tmp_path / folder)


def said(capsys: Any, *words: str, status: int = 0) -> str:
    assert main([*words]) == status
    out = capsys.readouterr()
    return out.out if status == 0 else out.err


def certified(capsys: Any, port: int) -> None:
    """A hub in `hub` and an approved site in `one`."""
    made = said(capsys, "hub", "init", "--folder", "hub", "--name", "study", "--host", "127.0.0.1", "--port", str(port))
    said(capsys, "site", "request", "clinic-one", "--folder", "one")
    said(capsys, "hub", "approve", "clinic-one.request", "--folder", "hub")
    joined = said(capsys, "site", "join", "clinic-one.kit", "--folder", "one")
    prints = [re.search(r"telephone: ([0-9a-f ]{39})", text) for text in (made, joined)]
    assert prints[0]
    assert prints[1]
    assert prints[0][1] == prints[1][1]  # two people can compare it


def test_from_nothing_to_a_run_and_a_revocation(here: Path, capsys: Any) -> None:
    certified(capsys, demo.free_port())
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 6)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez("ours.npz", train_x=x[:40], train_y=y[:40], test_x=x[40:], test_y=y[40:])
    assert "at work: fedstill hub start" in said(capsys, "hub", "run", "pfedsd", "--folder", "hub", status=2)
    assert "listens on 127.0.0.1" in said(capsys, "hub", "start", "--folder", "hub")
    assert "not at work yet" in said(capsys, "hub", "start", "--folder", "hub", status=2)
    started = said(
        capsys,
        "site",
        "start",
        "--folder",
        "one",
        "--data",
        "ours.npz",
        "--monitor",
        "memory>0",
        "--audit",
        "--save-every-epochs",
        "1",
        "--max-epsilon",
        "0",
    )
    assert "at work with 40 training and 20 test samples" in started
    canary = said(capsys, "hub", "canary", "pfedsd", "--folder", "hub")
    assert re.search(r"clinic-one +40 +3 +6 .* s\n", canary)
    assert "all sites are ready" in canary
    out = said(capsys, "hub", "run", "pfedsd", "--folder", "hub", "--rounds", "2", "--name", "first", "--audit")
    assert "round 2/2: personal" in out
    assert (here / "hub" / "runs" / "first" / "run" / "metrics.jsonl").exists()
    time.sleep(1.5)  # the hub writes its status every second
    assert re.search(r"clinic-one +here", said(capsys, "hub", "status", "--folder", "hub"))
    assert "personal.safetensors" in said(capsys, "site", "status", "--folder", "one")
    assert "as they were, to the bit" in said(capsys, "hub", "audit", "first", "--folder", "hub")
    assert said(capsys, "site", "audit", "--folder", "one").count("to the bit") == 2  # the canary's run, too
    run = here / "hub" / "runs" / "first" / "run"
    for file, named in {
        "audit/replies/000002-0001-train-clinic-one.bin": "the kept train reply of site 'clinic-one' in round 2 was changed",
        "audit/log.jsonl": "log.jsonl",
        "checkpoints/round-000002.safetensors": "the merged model of round 2 is damaged",
    }.items():
        data = (run / file).read_bytes()
        (run / file).write_bytes(
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        )
        assert named in said(capsys, "hub", "audit", "first", "--folder", "hub", status=1), file
        (run / file).write_bytes(data)
    out = said(
        capsys, "hub", "run", "ditto", "--folder", "hub", "--rounds", "2", "--mode", "fedasync", "--name", "second"
    )
    assert "round 2/2: personal" in out
    assert 'profile = "real"' in (here / "hub" / "runs" / "second" / "experiment.toml").read_text()
    message = said(
        capsys, "hub", "run", "ditto", "--folder", "hub", "--mode", "fedbuff", "--profile", "uniform", status=2
    )
    assert "profile = 'uniform': should be 'real' in a deployment" in message
    said(capsys, "hub", "revoke", "clinic-one", "--folder", "hub")
    assert "revoked" in said(capsys, "hub", "status", "--folder", "hub")
    assert "approved sites" in said(capsys, "hub", "run", "pfedsd", "--folder", "hub", status=2)  # none is left
    said(capsys, "site", "stop", "--folder", "one")
    assert "is stopped" in said(capsys, "hub", "stop", "--folder", "hub")
    assert "was not at work" in said(capsys, "hub", "stop", "--folder", "hub")


# ---- certificates ----------------------------------------------------------------------------------------------------
def test_no_key_leaves_its_folder_and_nobody_else_can_read_it(here: Path, capsys: Any) -> None:
    certified(capsys, 9000)
    key = (here / "one" / "site.key").read_text()
    assert "PRIVATE KEY" in key
    assert (here / "one" / "site.key").stat().st_mode & 0o077 == 0
    assert (here / "hub" / "root" / "root.key").stat().st_mode & 0o077 == 0
    for carried in ("clinic-one.request", "clinic-one.kit"):
        assert "PRIVATE" not in (here / carried).read_text()
    body = key.splitlines()[3]
    assert not [
        file for file in (here / "hub").rglob("*") if file.is_file() and body in file.read_text(errors="replace")
    ]


def change(file: str, **changed: Any) -> str:
    content = json.loads(Path(file).read_text())
    Path(f"changed-{file}").write_text(json.dumps({**content, **changed}))
    return f"changed-{file}"


def test_requests_and_kits_that_are_not_right_are_refused(here: Path, capsys: Any) -> None:
    certified(capsys, 9000)
    said(capsys, "site", "request", "clinic-two", "--folder", "two")
    said(capsys, "hub", "init", "--folder", "false", "--name", "study", "--host", "127.0.0.1")
    theirs = json.loads(Path("clinic-two.request").read_text())["request"]
    for name, words in {
        "another's name": ("hub", "approve", change("clinic-two.request", name="clinic-one"), "--folder", "hub"),
        "another key": ("hub", "approve", change("clinic-one.request", request=theirs), "--folder", "hub"),
        "no request": ("hub", "approve", change("clinic-two.request", request="x"), "--folder", "hub"),
        "a path": ("hub", "approve", change("clinic-two.request", name="../x"), "--folder", "hub"),
        "another's kit": ("site", "join", "clinic-one.kit", "--folder", "two"),
        "a kit of a host with a path": ("site", "join", change("clinic-one.kit", host="a/b"), "--folder", "one"),
        "no file": ("site", "join", "nothing.kit", "--folder", "one"),
        "no hub": ("hub", "approve", "clinic-two.request", "--folder", "nowhere"),
        "a hub's folder again": ("hub", "init", "--folder", "hub", "--name", "x", "--host", "h"),
        "a name with a space": ("site", "request", "clinic three", "--folder", "three"),
        "not joined": ("site", "start", "--folder", "two", "--data", "x.npz"),
        "no data": ("site", "start", "--folder", "one"),
        "no number of epochs": ("site", "start", "--folder", "one", "--data", "x.npz", "--save-every-epochs", "-1"),
        "no ε": ("site", "start", "--folder", "one", "--data", "x.npz", "--max-epsilon", "much"),
        "a wrong condition": ("site", "start", "--folder", "one", "--data", "x.npz", "--monitor", "load>1"),
        "revoking nobody": ("hub", "revoke", "clinic-nine", "--folder", "hub"),
    }.items():
        message = said(capsys, *words, status=2)
        assert message.startswith("fedstill: "), name
        assert message.count("\n") == 1, name
    owner = said(capsys, "hub", "run", "fedavg", "--folder", "hub", "--split", "70/30", status=2)
    assert "--split = '70/30': should be left out: a site's owner says it (fedstill site start --split)" in owner
    # a certificate that another root of the same name has signed
    kit = Hub.at(Path("false")).approve(Path("clinic-one.request").read_text(), "x")
    assert Site.at(Path("one")).join(json.dumps(kit), "x").hub == "study"  # hence the fingerprint
    again = Hub.at(Path("hub")).approve(Path("clinic-one.request").read_text(), "x")
    mixed = {**again, "root": kit["root"]}
    Path("mixed.kit").write_text(json.dumps(mixed))
    assert "root has signed" in said(capsys, "site", "join", "mixed.kit", "--folder", "one", status=2)
