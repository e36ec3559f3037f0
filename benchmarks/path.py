"""The files and functions of fedstill that one round executes, in order, by tracing.

    python benchmarks/path.py                    FedAvg; the default command; each for one run and for three seeds side by side
    python benchmarks/path.py --files            the files only

The second of three rounds is traced (the first one also warms up), in the process that coordinates; generated code (dataclasses)
and comprehensions count for the function around them. A function is listed where it is called for the first time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fedstill as fs
from fedstill.run import together
from fedstill.run.simulation import begin
from fedstill.server.coordinator import Coordinator

SOURCE = Path(fs.__file__).parent
ROUND = 2


class Tracer:
    """Collects (file, function) in the order of first calls while it is switched on."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self._files: dict[CodeType, str | None] = {}

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._files:
            file = Path(code.co_filename)
            ours = SOURCE in file.parents and not code.co_name.startswith("<")
            self._files[code] = file.relative_to(SOURCE).as_posix() if ours else None
        if (name := self._files[code]) is not None:
            self.calls.setdefault((name, code.co_qualname.replace(".<locals>", "")))


class Switch:
    """A callback that traces one round of a run."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def on_start(self, coordinator: Coordinator) -> None:
        pass

    def on_round(self, coordinator: Coordinator, record: dict[str, Any]) -> None:
        if record["round"] == ROUND - 1:
            sys.setprofile(self.tracer)
        elif record["round"] == ROUND:
            sys.setprofile(None)

    def on_end(self, coordinator: Coordinator) -> None:
        pass


CASES: dict[str, dict[str, Any]] = {
    "FedAvg, clients one by one": {"method": fs.FedAvg(), "engine": "one", "workers": 1, "fast": False},
    "fedstill run pfedsd": {"method": fs.PFedSD()},
}


def experiment(case: str) -> fs.Experiment:
    """A case of the table."""
    return fs.Experiment(rounds=3, device="cpu", **CASES[case])


def traced(experiment: fs.Experiment, seeds: int) -> list[tuple[str, str]]:
    """What one round executes: from the end of the round before to its own end."""
    switch = Switch(Tracer())
    starts = [begin(dataclasses.replace(experiment, seed=seed)) for seed in range(seeds)]
    starts[-1] = dataclasses.replace(starts[-1], callbacks=[switch])
    together.run_starts(starts)
    return list(switch.tracer.calls)


def show(title: str, calls: list[tuple[str, str]], write: Callable[[str], None] = print) -> int:
    """Print the files in order, each with its functions; return how many files there are."""
    files: dict[str, list[str]] = {}
    for file, function in calls:
        files.setdefault(file, []).append(function)
    write(f"\n{title}: {len(files)} files, {len(calls)} functions")
    for number, (file, functions) in enumerate(files.items(), start=1):
        write(f"{number:>3} {file}" + ("" if "--files" in sys.argv else f"\n      {', '.join(functions)}"))
    return len(files)


def main() -> None:
    for case in CASES:
        one = traced(experiment(case), 1)
        show(case, one)
        if CASES[case].get("engine") != "one":  # clients that train one by one are not stacked with other runs'
            three = traced(experiment(case), 3)
            print(
                f"three seeds side by side: {'the same' if one == three else 'ANOTHER'} sequence of files and functions"
            )


if __name__ == "__main__":
    main()
