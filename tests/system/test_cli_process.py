"""The command as a process of its own: exit status, a terminal, an interrupt, and machines with less installed."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fedstill import __version__

TINY = ["--rounds", "2", "--clients", "4", "--epochs", "1"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"}


def fedstill(*argv: str, cwd: Path, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedstill", *argv], cwd=cwd, env=ENV, text=True, capture_output=True, timeout=60, **more
    )


def test_status_and_streams(tmp_path) -> None:
    good = fedstill("--version", cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith(f"fedstill {__version__}")
    bad = fedstill("run", "pfedsd", "--lr", "x", "--out", "q", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "fedstill: --lr = 'x': should be a number above 0\n"
    assert list(tmp_path.iterdir()) == []


def test_without_rich_and_matplotlib(tmp_path) -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = None\n"
        "from fedstill.cli import main\n"
        f"sys.exit(main(['run', 'fedavg', *{TINY!r}, '--out', 'q']) or main(['data', 'show', '--out', 'who.png']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENV, text=True, capture_output=True, timeout=60
    )
    assert "round 2/2" in done.stdout
    assert "pip install 'fedstill[figures]' draws pictures" in done.stdout
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'fedstill[figures]'" in done.stderr
    assert not (tmp_path / "q/figure.png").exists()


def test_an_interrupt_says_how_to_go_on(tmp_path) -> None:
    argv = ["run", "fedavg", *TINY, "--rounds", "100000", "--checkpoint-every", "1000", "--out", "q"]
    started = subprocess.Popen(
        [sys.executable, "-m", "fedstill", *argv],
        cwd=tmp_path,
        env=ENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics = tmp_path / "q/metrics.jsonl"
    until = time.monotonic() + 40
    while time.monotonic() < until and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=30)
    assert started.returncode == 130
    assert re.fullmatch(
        r"fedstill: stops after this round, with a checkpoint; a second signal stops at once\n"
        r"fedstill: stopped after round \d+; 'fedstill resume q' goes on\n",
        err,
    )


def test_a_reader_that_leaves_is_no_error(tmp_path) -> None:
    line = f"{sys.executable} -m fedstill methods | head -c 10"
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=ENV, text=True, capture_output=True, timeout=60)
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal")
def test_in_a_terminal_a_line_for_each_method_moves(tmp_path) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 70))
    started = subprocess.Popen(
        [sys.executable, "-m", "fedstill", "compare", "local", "fedavg", *TINY],
        cwd=tmp_path,
        env={name: value for name, value in ENV.items() if name not in ("COLUMNS", "LINES")},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other end has closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert started.wait(timeout=60) == 0
    text = shown.decode()
    assert "━" in text
    assert "round 2/2" in text
    assert "\x1b[" in text
    assert "best personal accuracy" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    table = plain[plain.index("\nmethod") :]
    assert max(map(len, table.partition("nothing was written")[0].splitlines())) <= 70
    assert "not in 70 columns: " in table
