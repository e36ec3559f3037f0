"""The command `fedstill`. Bad input is reported in one line on stderr, with exit status 2; failed training with status 1."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..core import startup
from ..core.errors import HookError, InputError, TrainingError, nearest
from ..core.version import __version__
from ..report.fit import hanging
from ..run import signals

Command: TypeAlias = Callable[[Sequence[str]], None]

FULL = "the memory is full: less data, a smaller model, or a smaller --cohort takes less"
COMMANDS: dict[str, tuple[str, str]] = {  # by name: module and function, imported when it is run, and a line about it
    "run": ("train:run", "run one method: fedstill run METHOD, or fedstill run experiment.toml"),
    "compare": ("train:compare", "run several methods on the same data and set them side by side"),
    "sweep": ("train:sweep", "run one method with several values of a field: fedstill sweep pfedsd lam=0.1,0.5,1"),
    "check": ("check:check", "put a method of your own under the laws: fedstill check my_method.py:MOON"),
    "demo": ("train:demo", "compare four methods on handwritten digits; a table and a picture in a minute"),
    "resume": ("train:resume", "continue a run that was stopped"),
    "deploy-demo": (
        "deploy:run_demo",
        "a hub and three sites as processes with certificates, on the digits, in a minute",
    ),
    "hub": (
        "deploy:run_hub",
        "a hub of real sites, which keep their data: init, approve, start, run, status, stop, revoke",
    ),
    "site": ("deploy:run_site", "a site: request, join, start, status, stop"),
    "costs": ("costs:costs", "what a round costs by method: time, FLOPs, bytes, beside the first paper's numbers"),
    "show": ("finished:finished", "print finished runs side by side, from their folders: fedstill show runs/a runs/b"),
    "export": ("takeaway:export", "write a client's model, or the one for everybody, as safetensors, onnx or pt2"),
    "predict": ("takeaway:predict", "classify new samples with a client's model of a finished run"),
    "report": ("report:report", "write report.html, one page of results, from the folders of runs"),
    "watch": ("watch:watch", "show runs that go on as a page on this machine, which renews itself"),
    "papers": ("papers:papers", "list the papers' tables and figures: cells, data, cost here"),
    "reproduce": (
        "reproduce:reproduce",
        "run a paper's table or figure beside the published numbers: fedstill reproduce pfedsd/table2",
    ),
    "timeline": ("timeline:timeline", "draw a run's rounds in simulated time as a Gantt chart"),
    "methods": ("show:methods", "list the methods, with their papers and flags"),
    "models": ("show:models", "list the models"),
    "data": ("show:data", "list the data sets and partitions; 'fedstill data show' draws who has what"),
    "completion": ("completion:completion", "print what makes a shell complete all this: bash, zsh or fish"),
}

EXAMPLES = (
    ("fedstill demo", "see it work"),
    ("fedstill run pfedsd --rounds 20 --lam 0.5", "one method, its own flags"),
    ("fedstill compare local fedavg pfedsd --partition shards:2", "side by side, on the same split"),
    ("fedstill compare all --seeds 3 --out runs/all", "all methods, mean ± std over seeds, saved"),
    ("fedstill sweep pfedsd lam=0.1,0.5,1 --seeds 3", "several values of a field, as one stack where that pays"),
    ("fedstill check my_method.py:MOON", "a method of your own under the laws, in seconds"),
    ("fedstill costs fedavg pfedsd pfedme --model cnn-fmnist --no-time", "FLOPs and bytes of a round"),
    ("fedstill run pfedsd --profile lognormal:0.5 --drop 0.1 --out runs/slow", "on devices that differ, some lost"),
    ("fedstill report runs/all", "one page of results: who is best, and who should join"),
    ("fedstill watch runs/all", "the same while it goes on, from another terminal"),
    ("fedstill reproduce pfedkd-wcl/table1 --scale 0.1", "a published table, at a tenth of its size"),
    ("fedstill timeline runs/slow", "who worked and waited when"),
    ("fedstill data show --clients 10 --partition dirichlet:0.5", "who has which classes"),
    ("fedstill run runs/all/pfedsd/seed-0/experiment.toml --lr 0.05", "a saved run again, with one change"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # write ? where a terminal cannot write ±
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "help"
    command = load(name) if name in COMMANDS else None  # what stops this is said by `startup`
    startup.done()
    try:
        with signals.terminable():
            if command is not None:
                command(words[1:])
            elif name in ("-h", "--help", "help"):
                print(overview())
            elif name in ("-V", "--version"):
                print(version())
            else:
                raise InputError("command", name, nearest(name, COMMANDS))
            sys.stdout.flush()
    except InputError as error:
        return _stop(str(error), 2)
    except TrainingError as error:
        return _stop(str(error), 2 if isinstance(error, HookError) else 1)
    except KeyboardInterrupt as stopped:
        return _stop(str(stopped) or "stopped", 128 + getattr(stopped, "signal", signal.SIGINT))
    except MemoryError:
        return _stop(FULL, 1)
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
            return _stop("the GPU's memory is full: a smaller --cohort trains fewer clients at once", 1)
        if "can't allocate memory" not in str(error) and "can't start new thread" not in str(error):
            raise
        return _stop(FULL, 1)  # as torch says it, of its allocator on a CPU
    except BrokenPipeError:  # the reader has closed its end, as in `fedstill methods | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _stop(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    return 0


def load(name: str) -> Command:
    """Return the function of a command; importing it takes seconds where it needs PyTorch."""
    module, _, function = COMMANDS[name][0].partition(":")
    command: Command = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return command


def version() -> str:
    """Return the versions of fedstill, PyTorch and Python."""
    torch = importlib.metadata.version("torch")
    return f"fedstill {__version__} (torch {torch}, Python {platform.python_version()})"


def overview() -> str:
    """Return the text that `fedstill` prints without a command."""
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = ["fedstill: personalised federated learning by distillation", "", "commands:"]
    lines += [hanging(f"  {name:<11} ", line, room) for name, (_, line) in COMMANDS.items()]
    width = max(len(command) for command, _ in EXAMPLES)
    beside = room is None or room >= width + max(len(what) for _, what in EXAMPLES) + len("    # ")
    gap = f"{{:<{width}}}  # " if beside else "{}\n      # "
    lines += ["", "examples:", *(f"  {gap.format(command)}{what}" for command, what in EXAMPLES), ""]
    end = "'fedstill COMMAND --help' lists a command's flags, 'fedstill --version' prints the version."
    return "\n".join([*lines, hanging("", end, room)])


def _stop(message: str, status: int) -> int:
    """Print an error in one line; return the exit status."""
    print(f"fedstill: {' '.join(message.split())}", file=sys.stderr)
    return status
