"""The command `completion`: what makes a shell complete commands, methods, flags and their values."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import InputError, Shown, nearest
from ..methods import METHODS
from ..models import MODELS
from . import COMMANDS, flags, load
from .deploy import HUB_WORDS, SITE_WORDS
from .screen import say

SHELLS = ("bash", "zsh", "fish")
ALL_BY = {"run": "--help-all", "compare": "--help-all", "sweep": "--help-all", "demo": "--help-all"}
FLAG = re.compile(r"^  (?:-h, )?(--[a-z][a-z0-9-]*)(?:, (--no-[a-z0-9-]+))?(?: \{([^}]*)\})?", re.MULTILINE)
ABOUT = (
    "Print what makes a shell complete fedstill's commands, methods, models and flags. bash: "
    'eval "$(fedstill completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc with zsh; fish: '
    "fedstill completion fish > ~/.config/fish/completions/fedstill.fish."
)


@dataclass(frozen=True)
class Completions:
    """What may follow a command."""

    words: Sequence[str]
    flags: Sequence[str]


def completion(argv: Sequence[str]) -> None:
    """`fedstill completion SHELL`."""
    examples = ("fedstill completion bash", "fedstill completion fish")
    parser = flags.Parser("completion", ABOUT, "bash|zsh|fish", examples)
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if len(words) != 1 or words[0] not in SHELLS:
        raise InputError("shell", Shown(" ".join(words) or "nothing"), nearest(" ".join(words), SHELLS))
    after, values = collect()
    say({"bash": bash, "zsh": zsh, "fish": fish}[words[0]](after, values))


def collect() -> tuple[dict[str, Completions], dict[str, list[str]]]:
    """Return what follows each command, and the values of flags that take one of a few; from the commands' own help."""
    words: dict[str, Sequence[str]] = {
        **dict.fromkeys(("run", "sweep", "check", "methods"), sorted(METHODS)),
        **{name: [*sorted(METHODS), "all"] for name in ("compare", "costs")},
        **{"hub": list(HUB_WORDS), "site": list(SITE_WORDS), "data": ["show"], "completion": SHELLS},
    }
    values: dict[str, list[str]] = {"--model": list(MODELS)}
    after = {}
    for name in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            if name != "completion":
                load(name)([ALL_BY.get(name, "--help")])
        found = ["--help"]
        for flag, no, options in FLAG.findall(shown.getvalue()):
            found += [text for text in (flag, no) if text]
            if options:
                values[flag] = list(dict.fromkeys([*values.get(flag, []), *options.split(",")]))
        after[name] = Completions(words.get(name, ()), list(dict.fromkeys(found)))
    return after, values


def bash(after: Mapping[str, Completions], values: Mapping[str, Sequence[str]]) -> str:
    """Return bash's function; where it has no word, bash completes files."""
    by_value = [
        f'    {flag}) COMPREPLY=($(compgen -W "{" ".join(of)}" -- "$cur")); return ;;' for flag, of in values.items()
    ]
    by_command = [
        f'    {name}) words="{" ".join(of.words)}"; flags="{" ".join(of.flags)}" ;;' for name, of in after.items()
    ]
    return "\n".join(
        [
            "_fedstill() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words="" flags=""',
            f'  local commands="{" ".join(after)} --help --version"',
            '  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "$commands" -- "$cur")); return; fi',
            '  case "$prev" in',
            *by_value,
            "  esac",
            '  case "${COMP_WORDS[1]}" in',
            *by_command,
            "  esac",
            '  case "$cur" in',
            '    -*) COMPREPLY=($(compgen -W "$flags" -- "$cur")) ;;',
            '    *) COMPREPLY=($(compgen -W "$words" -- "$cur")) ;;',
            "  esac",
            "}",
            "complete -o default -F _fedstill fedstill",
        ]
    )


def zsh(after: Mapping[str, Completions], values: Mapping[str, Sequence[str]]) -> str:
    """Return bash's function for zsh, which can take it."""
    return "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + bash(after, values)


def fish(after: Mapping[str, Completions], values: Mapping[str, Sequence[str]]) -> str:
    """Return fish's lines."""
    lines = []
    for name, of in after.items():
        about = COMMANDS[name][1].replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c fedstill -n __fish_use_subcommand -f -a {name} -d '{about}'")
        when = f"complete -c fedstill -n '__fish_seen_subcommand_from {name}'"
        if of.words:
            lines.append(f"{when} -a '{' '.join(of.words)}'")
        for flag in of.flags:
            options = f" -x -a '{' '.join(values[flag])}'" if flag in values else ""
            lines.append(f"{when} -l {flag.removeprefix('--')}{options}")
    return "\n".join(lines)
