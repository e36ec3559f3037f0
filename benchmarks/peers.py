"""How fast a round of FedAvg is here and in the peers of the package index: the same model, data and number of SGD steps.

    python benchmarks/peers.py [--workload mlp|cnn|cnn-same|all] [--peers pfl,fedjax,…] [--rounds N] [--check] [--out FILE]

Every competitor has an environment of its own, made by this script with pip (as pip is configured) and kept for the next time,
and is a process of its own, which runs one round when it is told and answers with the seconds it took. Rounds go round robin, so
that a machine that slows down slows all; ratios are medians of the ratios round by round. The whole round counts: choosing the
cohort, sending, training, merging; evaluation is off. One core: pinned to one, one thread. More: pinned to as many, used as each
can. What each runs is in `benchmarks/peers/run_*.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONSTRAINTS = "torch==2.13.0\n"  # nothing else: a peer gets the numpy that it wants
MARK = "FEDSTILL_PEER"  # in the environment of all of a competitor's processes, wherever they are
PATIENCE = 900  # seconds for one answer


@dataclass(frozen=True)
class Peer:
    """An environment: what pip is asked for, one command after another, and what is to be known about it."""

    pip: tuple[str, ...]
    note: str = ""


PEERS = {
    "fedstill": Peer(("torch numpy", shlex.join(("--editable", str(ROOT)))), "engine `one`"),
    "plain": Peer((), "DataLoader, `optim.SGD`, deepcopy, mean of state dicts: the loop that most people write"),
    "pfl": Peer(
        ("torch pfl==0.6.0",),
        "FederatedAveraging on SimulatedBackend, stepped by a callback; it does not shuffle a client's samples; "
        "on more cores torch.distributed over two processes",
    ),
    "fedjax": Peer(
        ("fedjax==0.0.17 jax==0.10.2 jaxlib==0.10.2 dm-haiku==0.0.17",),
        "`fed_avg` with the jit backend, Haiku; `jax.tree_map`, which newer jax has removed, is given back to it; its pmap "
        "backend does not run on this jax, so on more cores it has XLA's threads",
    ),
    "fedlab": Peer(
        ("torch numpy pandas scikit-learn pynvml tqdm munch pillow", "--no-deps fedlab==1.3.0"),
        "SGDSerialClientTrainer, standalone; weights all clients alike (here the same: sizes are equal); an empty stand-in for "
        "torchvision, which it imports for data sets that are not used; on more cores torch's threads",
    ),
    "blazefl": Peer(
        ("torch numpy tqdm", "--no-deps --ignore-requires-python blazefl==2.0.3"),
        "asks for Python 3.12 or newer, runs as it is on 3.11; one by one on one core, its pools on more "
        "(processes are forked anew every round, from a parent that has already imported what a first step imports)",
    ),
    "flwr": Peer(
        ("torch flwr[simulation]==1.41.0",),
        "ServerApp, ClientApp and FedAvg by run_simulation on Ray, one CPU a client, stepped by the strategy's evaluate_fn; "
        "messages are polled every 0.1 s; Ray's own processes share the cores; timed after the others, since Ray is never idle",
    ),
}


@dataclass(frozen=True)
class Workload:
    """One table."""

    title: str
    samples: int
    batch: int


WORKLOADS = {
    "mlp": Workload("MLP 784-128-10", 600, 20),
    "cnn": Workload("CNN, two 5×5 convolutions (32, 64) without padding, fc 512", 640, 64),
    "cnn-same": Workload("CNN, two 5×5 convolutions (32, 64) padded to the same size, fc 512", 640, 64),
}


@dataclass
class Competitor:
    """One row: a process, and what it answered."""

    peer: str
    cores: int
    how: str
    threads: int
    spec: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    memory: float = 0.0
    why: str = ""  # why it is out

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.cores} core{'s' * (self.cores > 1)}, {self.how}"

    def start(self, python: Path, spec: dict[str, Any], cpus: list[int], logs: Path) -> None:
        self.mark, self.log = f"{os.getpid()}-{id(self)}", logs / f"{id(self)}.log"
        threads = str(self.threads)
        xla = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if self.threads == 1 else ""
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "XLA_FLAGS": xla,
            "JAX_PLATFORMS": "cpu",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(HERE / "peers"),
            "PYTHONDONTWRITEBYTECODE": "1",
            MARK: self.mark,
        }

        def pin() -> None:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cpus)

        self.process = subprocess.Popen(
            [python, HERE / "peers" / f"run_{self.peer}.py", json.dumps(spec | self.spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), env=environment, preexec_fn=pin,
        )  # fmt: skip
        self.versions = self.read()["versions"]

    def ask(self, word: str) -> dict[str, Any]:
        try:
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()
        except OSError:
            raise RuntimeError(last_line(self.log)) from None
        return self.read()

    def read(self) -> dict[str, Any]:
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise RuntimeError(f"no answer within {PATIENCE} s")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(last_line(self.log))
        return json.loads(line)

    def round(self) -> float:
        answer = self.ask("round")
        self.steps = answer["steps"]
        return answer["seconds"]

    def measure_memory(self) -> None:
        """The peak during one more round."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                self.memory = max(self.memory, memory_of(processes_of(self.mark)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self.round()
        finally:
            over.set()
            watcher.join()

    def stop(self) -> None:
        """End it, and what it has started and left behind."""
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            for pid in processes_of(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def competitors(peers: list[str], cores: int) -> list[Competitor]:
    """All rows; `fedstill` is always one of them."""
    single = {"pool": "none", "processes": 1, "actors": 1, "workers": 1}
    rows = {
        "fedstill": [
            Competitor("fedstill", 1, "1 worker", 1, single),
            Competitor("fedstill", cores, f"{cores} workers", cores, {"workers": cores}),
        ],
        "plain": [
            Competitor("plain", 1, "1 thread", 1),
            Competitor("plain", cores, f"{cores} threads", cores),
        ],
        "pfl": [
            Competitor("pfl", 1, "1 process", 1, single),
            Competitor("pfl", cores, "2 processes", 1, {"processes": 2}),
        ],
        "fedjax": [
            Competitor("fedjax", 1, "jit, 1 thread", 1),
            Competitor("fedjax", cores, f"jit, {cores} threads", cores),
        ],
        "fedlab": [
            Competitor("fedlab", 1, "1 thread", 1),
            Competitor("fedlab", cores, f"{cores} threads", cores),
        ],
        "blazefl": [
            Competitor("blazefl", 1, "one by one", 1, single),
            Competitor("blazefl", cores, "2 processes", 1, {"pool": "processes"}),
            Competitor("blazefl", cores, "2 threads", 1, {"pool": "threads"}),
        ],
        "flwr": [
            Competitor("flwr", 1, "1 actor", 1, single),
            Competitor("flwr", cores, f"{cores} actors", 1, {"actors": cores}),
        ],
    }
    last = None if cores > 1 else 1
    chosen = [row for name, found in rows.items() if name in ("fedstill", *peers) for row in found[:last]]
    return sorted(chosen, key=lambda row: row.cores)


def processes_of(mark: str) -> list[int]:
    """All processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def memory_of(pids: list[int]) -> float:
    """Bytes that processes hold together: pages they share count once, and of a program's files the largest share in memory."""
    total, files = 0, {}
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):
            rollup, status = fields_of(f"/proc/{pid}/smaps_rollup"), fields_of(f"/proc/{pid}/status")
            total += rollup["Pss_Anon"] + rollup["Pss_Shmem"]
            program = os.readlink(f"/proc/{pid}/exe")
            files[program] = max(files.get(program, 0), status["RssFile"])
    return total + sum(files.values())


def fields_of(path: str) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes."""
    found = {}
    for line in Path(path).read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def last_line(log: Path) -> str:
    """The last line of what a process had to say, without what cannot be a reason."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("ERROR")]
    return ((errors or lines or ["it ended without a word"])[-1])[:200]


def environment(name: str, envs: Path) -> Path:
    """The Python of a peer's environment, made if it is not there; RuntimeError says why it cannot be."""
    folder = envs / name
    python, complete, log = folder / "bin" / "python", folder / "complete", envs / f"{name}.log"
    recipe = "\n".join((platform.python_version(), CONSTRAINTS, *PEERS[name].pip))
    if complete.is_file() and complete.read_text() == recipe:
        return python
    print(f"{name}: making its environment", flush=True)
    began = time.perf_counter()
    envs.mkdir(parents=True, exist_ok=True)
    constraints = envs / "constraints.txt"
    constraints.write_text(CONSTRAINTS)
    complete.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(constraints)]
    with log.open("w") as said:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            *([*pip, *shlex.split(wanted)] for wanted in PEERS[name].pip),
        ):
            if "install" in command:
                print(f"{name}: pip install {' '.join(command[len(pip) :])}", flush=True)
            if subprocess.run(command, stdout=said, stderr=said).returncode:
                raise RuntimeError(last_line(log))
    complete.write_text(recipe)
    print(f"{name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
    return python


def run(name: str, rows: list[Competitor], pythons: dict[str, Path], options: argparse.Namespace) -> None:
    """One workload: start and warm up all, rounds round robin, then one round each for memory; Flower after the others."""
    work = WORKLOADS[name]
    samples, batch = options.samples or work.samples, work.batch
    if samples % batch:
        raise SystemExit(f"--samples {samples}: a multiple of {batch} for {name}, so that all take the same steps")
    data = options.envs / f"{options.clients}x{samples}.npz"
    if not data.is_file():
        command = [HERE / "peers" / "data.py", data, str(options.clients), str(samples), ROOT / "data"]
        subprocess.run([pythons["fedstill"], *command], check=True)
    spec = {
        "workload": name, "data": str(data), "clients": options.clients, "cohort": options.cohort, "batch": batch,
        "lr": 0.05, "rounds": options.warm + options.rounds + 1,
    }  # fmt: skip
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as logs:

        def each(group: list[Competitor], what: str, do: Any) -> None:
            for row in group:
                if not row.why:
                    try:
                        do(row)
                    except (RuntimeError, OSError, ValueError) as error:
                        row.why = f"{what}: {error}"
                        print(f"{name}: {row.name}: {row.why}", flush=True)
                        row.stop()

        def begin(row: Competitor) -> None:
            row.start(pythons[row.peer], spec | {"scratch": logs}, cpus[-row.cores :], Path(logs))
            if options.check:
                row.losses.append(row.ask("loss")["loss"])
            row.first = row.round()
            for _ in range(options.warm - 1):
                row.round()
            print(f"{name}: {row.name}: warm, first round {row.first:.2f} s", flush=True)

        def all_of(group: list[Competitor]) -> None:
            each(group, "does not start", begin)
            for t in range(options.rounds):
                each(group, "stopped", lambda row: row.seconds.append(row.round()))
                print(f"{name}: round {t + 1} of {options.rounds}", flush=True)
            each(group, "stopped", Competitor.measure_memory)
            if options.check:
                each(group, "stopped", lambda row: row.losses.append(row.ask("loss")["loss"]))

        for restless in (False, True):  # Ray works a little even while it waits: it would disturb the others
            group = [row for row in rows if (row.peer == "flwr") == restless and not row.why]
            try:
                if group:
                    all_of(group)
            finally:
                for row in group:
                    row.stop()


def ratio(of: Competitor, to: Competitor) -> float:
    """How many times as long a round of one takes as one of the other."""
    return statistics.median(a / b for a, b in zip(of.seconds, to.seconds, strict=True))


def table(name: str, rows: list[Competitor], options: argparse.Namespace) -> list[str]:
    """One workload as Markdown, with what follows from it."""
    work, done = WORKLOADS[name], [row for row in rows if not row.why]
    samples = options.samples or work.samples
    steps = options.cohort * samples // work.batch
    lines = [
        f"### {work.title}",
        "",
        f"{options.clients} clients with {samples} samples, {options.cohort} a round, batch {work.batch}, one epoch: "
        f"{steps} SGD steps a round. Median of {options.rounds} rounds; × is the time over fedstill's on as many cores.",
        "",
        "| framework | cores | how | s a round | × fedstill | first round, s | memory, MB |"
        + " loss |" * options.check,
        "|---|---|---|---|---|---|---|" + "---|" * options.check,
    ]
    ours = {row.cores: row for row in done if row.peer == "fedstill"}
    for row in rows:
        version = row.versions.get(row.peer, "")
        cells = [f"{row.peer} {version}".strip(), str(row.cores), row.how]
        if row.why:
            cells += [row.why.replace("|", "/"), "", "", ""] + [""] * options.check
        else:
            times = f"{ratio(row, ours[row.cores]):.2f}" if row.cores in ours else ""
            cells += [f"{statistics.median(row.seconds):.3g}", times, f"{row.first:.2f}", f"{row.memory / 1e6:.0f}"]
            if row.steps != steps:
                cells[3] += f" (**{row.steps} steps, not {steps}**)"
            if options.check:
                cells.append(f"{row.losses[0]:.2f} → {row.losses[-1]:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for cores, mine in ours.items():
        others = [row for row in done if row.cores == cores and row.peer not in ("fedstill", "plain")]
        if others:
            best = min(others, key=lambda row: ratio(row, mine))
            lines.append(f"- {mine.name}: the fastest peer, {best.name}, takes {ratio(best, mine):.2f} times as long.")
    if len(ours) == 2:
        one, many = (ours[cores] for cores in sorted(ours))
        most = options.cohort / -(-options.cohort // many.cores)
        lines.append(
            f"- fedstill, {many.how}: {ratio(one, many):.2f} times as fast as with one ({options.cohort} clients over "
            f"{many.cores} workers: at most {most:.2f} if a client is never divided)."
        )
    return [*lines, ""]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedstill" / "peers"
    names = [name for name in PEERS if name != "fedstill"]
    add = parser.add_argument
    add("--workload", choices=[*WORKLOADS, "all"], default="all", help="which table (default: all)")
    add("--peers", default=",".join(names), help=f"any of {', '.join(names)} (default: all; fedstill always runs)")
    add("--rounds", type=int, default=9, help="timed rounds of each (default: 9)")
    add("--warm", type=int, default=2, help="rounds before these (default: 2)")
    add("--clients", type=int, default=20, help="clients (default: 20)")
    add("--cohort", type=int, default=5, help="clients a round (default: 5)")
    add("--samples", type=int, default=0, help="samples a client (default: 600 for mlp, 640 for cnn)")
    add("--cores", type=int, default=2, help="cores of the second half of the table; 1: no second half (default: 2)")
    add("--check", action="store_true", help="also print the global model's loss before and after")
    add("--envs", type=Path, default=cache, help="folder of the environments (default: the user's cache folder)")
    add("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name]
    unknown = sorted(set(options.peers) - set(names))
    if unknown:
        parser.error(f"--peers: {', '.join(unknown)}: not one of {', '.join(names)}")
    if min(options.rounds, options.warm, options.clients, options.cohort, options.cores) < 1:
        parser.error("--rounds, --warm, --clients, --cohort and --cores: at least 1")
    if options.cohort > options.clients:
        parser.error(f"--cohort {options.cohort}: at most --clients {options.clients}")
    if options.cores > (os.cpu_count() or 1):
        parser.error(f"--cores {options.cores}: this machine has {os.cpu_count()}")
    options.envs = options.envs.resolve()
    return options


def main() -> None:
    options, began = arguments(), time.perf_counter()
    pythons: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for name in ["fedstill", *options.peers]:
        try:
            pythons[name] = pythons["fedstill"] if name == "plain" else environment(name, options.envs)
        except RuntimeError as error:
            missing[name] = f"does not install: {error}"
            print(f"{name}: {missing[name]}", flush=True)
    if "fedstill" in missing:
        raise SystemExit(1)
    report: list[str] = []
    versions: dict[str, dict[str, str]] = {}
    for name in WORKLOADS if options.workload == "all" else [options.workload]:
        rows = competitors(options.peers, options.cores)
        for row in rows:
            row.why = missing.get(row.peer, "")
        run(name, rows, pythons, options)
        report += table(name, rows, options)
        versions |= {row.peer: row.versions for row in rows if row.versions}
    report += [
        f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}. "
        "Memory is the peak of all processes of a competitor during one more round, pages that they share counted once.",
        "",
    ]
    for name, found in versions.items():
        report.append(f"- {name} ({', '.join(f'{k} {v}' for k, v in found.items())}): {PEERS[name].note}.")
    text = "\n".join(report) + "\n"
    print(f"\n{text}\n{time.perf_counter() - began:.0f} s in all")
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def processor() -> str:
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
