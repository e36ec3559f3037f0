"""The live page: in a real browser while runs go on and when they are stopped; and what it shows of a folder."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedstill.cli import main
from fedstill.report.html.live import Live, Progress, at_work, left, progress_of, render

from .. import chromium

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SLOW = [
    "--clients",
    "6",
    "--epochs",
    "3",
    "--rounds",
    "3000",
    "--checkpoint-every",
    "1000",
    "--engine",
    "one",
    "--workers",
    "1",
]
EVIL = "<img src=x onerror=\"document.title='taken'\">"


def fedstill(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "fedstill", *words], env=ENV, text=True, stdout=-1, stderr=-1)


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A comparison in another process, of which some rounds are over."""
    out = tmp_path / "all"
    run = fedstill("compare", "fedavg", "pfedsd", *SLOW, "--out", str(out))
    try:
        end = time.monotonic() + 120
        while not (out / "fedavg" / "metrics.jsonl").is_file():
            assert run.poll() is None, run.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.1)
        yield run, out
    finally:
        run.kill()
        run.communicate()


def get(port: int, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_a_page_follows_runs_until_they_stop(going_on, tmp_path: Path) -> None:
    run, out = going_on
    before = sorted(path.name for path in out.iterdir())
    page = fedstill("watch", str(out))
    try:
        said = page.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+) ", said)[1])
        assert sorted(path.name for path in out.iterdir()) == before, "it writes nothing"
        assert get(port, "/", Host=f"evil.example:{port}").status == 403
        assert get(port, "/../../etc/passwd").status == 404
        answer = get(port, "/")
        assert answer.getheader("Content-Security-Policy").startswith("frame-ancestors 'none'")
        assert b"connect-src &#x27;self&#x27;" in answer.read()
        with chromium.opened() as tab:
            tab.open(f"http://127.0.0.1:{port}/", 1280)
            drawn = "return document.querySelector('#curves svg path.line') !== null"
            tab.wait(drawn)
            words = "return document.querySelector('p.answer').textContent"
            first = tab.script(words)
            assert re.fullmatch(r"[\d,]+ of 6,000 rounds, about .* left\.", first)
            tab.script("document.querySelectorAll('button[data-pane]')[1].click()")
            shown = "return document.querySelector('button[data-pane][aria-pressed=true]').dataset.pane"
            pane = tab.script(shown)
            tab.wait(f"return document.querySelector('p.answer').textContent !== {json.dumps(first)}")
            assert tab.script(shown) == pane, "what was chosen stays"
            for name, width, dark in (("wide", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
                tab.open(f"http://127.0.0.1:{port}/", width, dark=dark)
                tab.wait(drawn)
                assert tab.overflow() <= 0
                tab.screenshot(tmp_path / f"{name}.png")
            run.send_signal(signal.SIGINT)
            tab.wait("return document.querySelector('p.answer').textContent.startsWith('Stopped after')", 60)
            assert [line for line in tab.messages if "favicon" not in line] == []
        run.wait(60)
        assert page.wait(60) == 0
        assert f"stopped: 'fedstill resume {out}' goes on" in page.stdout.read()
    finally:
        page.kill()
        page.communicate()


def test_what_does_not_go_on_is_refused(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "fedavg", "--rounds", "1", "--clients", "3", "--epochs", "1", "--out", "a"]) == 0
    capsys.readouterr()
    for words, says in (
        ([], "one folder of a run"),
        (["none"], "a run, a comparison or a sweep that has begun"),
        (["a"], "'fedstill report a' shows what is over"),
    ):
        assert main(["watch", *words]) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1


def test_a_page_of_a_folder_shows_progress_refusals_and_no_markup_of_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "fedavg", "local", "--rounds", "3", "--clients", "3", "--epochs", "1", "--out", "a"]) == 0
    metrics = Path("a/local/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records[1]["rejected"] = {"2": EVIL}
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    text = Live(Path("a")).part()
    assert "Stopped after 5 of 6 rounds" in text
    assert "fedavg: 3 of 3 rounds" in text
    assert "Refused: 1" in text
    assert EVIL not in text
    assert "&lt;img src=x" in text
    assert "data-curves" in text
    runs = progress_of(Path("a"))
    assert [(run.label, run.done, run.rounds) for run in runs] == [("fedavg", 3, 3), ("local", 2, 3)]
    assert not at_work(Path("a"))
    assert "3 rounds, about" not in render(runs, True, None)


def test_the_time_left_is_that_of_each_runs_own_pace() -> None:
    """30 s for a first round and 2 s for each after it: what is left are 7 rounds of 2 s, and 10 of a run that waits."""
    rounds = [{"seconds": 30.0}, {"seconds": 2.0}, {"seconds": 22.0, "compile_seconds": 20.0}]
    begun = Progress("a", 0, 10, rounds)
    assert left([begun]) == 14
    assert left([begun, Progress("b", 0, 10, [])]) == 14 + 20
    assert left([begun, Progress("b", 0, 10, [{"seconds": 5.0}])]) == 14 + 45
    assert left([begun, Progress("b", 0, 10, [{"seconds": 5.0}], "diverged")]) == 14
    assert left([Progress("b", 0, 10, [])]) is None


def test_who_is_at_work_is_known_by_its_note(tmp_path: Path) -> None:
    note = tmp_path / ".lock"
    assert not at_work(tmp_path)
    host = os.uname().nodename
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for text, working in (
        (f"process {os.getpid()} on {host}\n", True),
        (f"process {ended.pid} on {host}\n", False),
        ("process 1 on another-host\n", True),
        ("", False),
        ("process x on y z", False),
    ):
        note.write_text(text)
        assert at_work(tmp_path) == working, text
