"""Steps that are compiled ahead: which groups, in what order, and that another process finds them on disk."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import textwrap
from pathlib import Path

import fedstill as fs
from fedstill.reproduce.ahead import Unmeasured, compile_groups
from fedstill.reproduce.store import values_of
from fedstill.run.experiment import Experiment


def compiled(groups: str, reached: list[int | None], fails: dict[str, list[BaseException]] | None = None) -> str:
    """Return which groups were tried, in order; `fails` has what each raises, once each."""
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for number in reached:
        told.put(number)
    tried, left = [], {name: list(errors) for name, errors in (fails or {}).items()}

    def compile_group(name: str) -> None:
        tried.append(name)
        if left.get(name):
            raise left[name].pop(0)

    compile_groups(groups, compile_group, told)
    return "".join(tried)


def test_groups_that_have_begun_are_left_out() -> None:
    assert compiled("abcd", []) == "abcd"
    assert compiled("abcd", [0]) == "bcd"
    assert compiled("abcd", [0, 1, 2]) == "d"
    assert compiled("abcd", [3]) == ""


def test_what_was_not_measured_is_tried_again_when_the_runner_has_gone_on() -> None:
    class Told(queue.SimpleQueue):
        """Tells 0 at once, 1 when somebody waits, then the end."""

        def __init__(self, later: list[int | None]) -> None:
            self.later, self.now = later, [0]

        def empty(self) -> bool:
            return not self.now

        def get(self, *_: object) -> int | None:
            return self.now.pop() if self.now else self.later.pop(0)

    def run(later: list[int | None]) -> str:
        tried, errors = [], [Unmeasured()]

        def compile_group(name: str) -> None:
            tried.append(name)
            if name == "c" and errors:
                raise errors.pop()

        compile_groups("abcd", compile_group, Told(later))
        return "".join(tried)

    assert run([1]) == "bccd"
    assert run([2]) == "bcd"  # the runner has begun it: it measures and compiles by itself
    assert run([None]) == "bc"  # the runner has ended


def test_a_group_that_fails_is_left_to_the_runner() -> None:
    assert compiled("abc", [], {"b": [ValueError("no such thing")]}) == "abc"


def test_another_process_finds_the_compiled_step_on_disk(tmp_path: Path) -> None:
    experiment = Experiment.from_values(
        {"data": "digits", "clients": 3, "partition": "iid", "rounds": 2, "epochs": 1, "participation": 1.0, "engine": "stacked",
         "compile": "on", "device": "cpu", "method": {"id": "fedavg"}}
    )  # fmt: skip
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(fs.__file__).parents[1]),
    }
    given = json.dumps({"groups": [[values_of(experiment)]], "scale": 1.0, "root": ""}) + "\n"
    ahead = subprocess.Popen(
        [sys.executable, "-m", "fedstill.reproduce.ahead"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    ahead.stdin.write(given)  # and left open: a runner that has ended needs nothing compiled
    ahead.stdin.flush()
    assert ahead.wait(300) == 0, ahead.stderr.read()
    script = f"""
        from torch._dynamo.utils import counters
        import fedstill as fs
        from fedstill.run.experiment import Experiment
        from fedstill.run.simulation import run
        run(Experiment.from_values({{**{values_of(experiment)!r}, "data_root": ""}}))
        print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    hits, misses = map(int, done.stdout.split()[-2:])
    assert hits >= 1, done.stderr
    assert misses == 0
