"""Shell completion: bash is asked, the others' lines are read (and parsed, where the shell is here)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedstill.cli import COMMANDS, main
from fedstill.methods import METHODS
from fedstill.models import MODELS


def script(shell: str, capsys) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(file: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f'source {file}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _fedstill; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return set(subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_bash_completes(tmp_path: Path, capsys) -> None:
    file = tmp_path / "fedstill.bash"
    file.write_text(script("bash", capsys))
    assert completed(file, "fedstill", "") == {*COMMANDS, "--help", "--version"}
    assert completed(file, "fedstill", "com") == {"compare", "completion"}
    assert completed(file, "fedstill", "run", "") == set(METHODS)
    assert completed(file, "fedstill", "run", "pfedk") == {"pfedkd-wcl"}
    assert completed(file, "fedstill", "compare", "fedavg", "al") == {"all"}
    assert {"--lam", "--lam-g", "--lam-p"} == completed(file, "fedstill", "run", "pfedsd", "--lam")
    assert {"--nesterov", "--no-nesterov"} <= completed(file, "fedstill", "run", "--n") | completed(
        file, "fedstill", "run", "--no-n"
    )
    assert completed(file, "fedstill", "run", "pfedsd", "--model", "") == set(MODELS)
    assert completed(file, "fedstill", "run", "pfedsd", "--engine", "") == {"auto", "one", "stacked"}
    assert completed(file, "fedstill", "hub", "st") == {"start", "status", "stop"}
    assert completed(file, "fedstill", "watch", "--p") == {"--port"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "completions"
    text = script(shell, capsys)
    file.write_text(text)
    assert all(name in text for name in (*COMMANDS, *METHODS))
    if shell == "fish":
        assert "complete -c fedstill -n '__fish_seen_subcommand_from run' -l lam\n" in text
        assert all(line.startswith("complete -c fedstill -n ") for line in text.splitlines())
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(file)], check=True)


def test_another_shell_is_refused(capsys) -> None:
    for words in ([], ["csh"], ["bash", "zsh"]):
        assert main(["completion", *words]) == 2
        assert "one of: bash, fish, zsh" in capsys.readouterr().err
