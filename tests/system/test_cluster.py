"""Clients divided among the processes of torchrun: every number and model is as in one process, to the bit."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill import models
from fedstill.cli import main
from fedstill.run import cluster
from fedstill.run.prepare import federation_of, from_experiment, prepare
from fedstill.transport import parcel
from fedstill.transport.messages import Order, Reply

HERE = Path(__file__).parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fs.__file__).parents[1])}


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return subprocess.run([*launch, *words], capture_output=True, text=True, timeout=240, env=ENV)


def compared(ranks: int, out: Path, reduce: int, methods: Sequence[str]) -> dict[str, dict]:
    done = torchrun(ranks, str(HERE / "ranks.py"), str(out), str(reduce), *methods)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("method"): row for row in rows}


@pytest.mark.parametrize(
    ("ranks", "methods"), [(2, tuple(fs.METHODS)), (1, ("pfedsd",)), (4, ("pfedsd", "scaffold", "fedrep", "spectral"))]
)
def test_ranks_give_the_bits_of_one_process(ranks: int, methods: tuple[str, ...], tmp_path: Path) -> None:
    """History, further scores, checkpoint, generic and every personal model."""
    rows = compared(ranks, tmp_path, 0, methods)
    assert list(rows) == list(methods)
    right = {"history": True, "scores": True, "checkpoint": True, "generic": 0.0, "personal": 0.0, "flops": True}
    assert {method: row for method, row in rows.items() if row != right} == {}


def test_reduced_uploads_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Where a merge is one mean the uploads are added up on their ranks; SCAFFOLD's needs two, and is as it was."""
    rows = compared(2, tmp_path, 1, ("fedavg", "pfedsd", "fedrep", "pfedme", "scaffold"))
    assert all(row["scores"] and row["generic"] < 1e-12 and row["personal"] < 1e-12 for row in rows.values())
    assert [method for method, row in rows.items() if row["checkpoint"]] == ["scaffold"]


def test_uploads_that_the_gate_would_refuse_are_not_reduced() -> None:
    one = fs.Experiment(method=fs.FedAvg(), clients=5, dtype="float64", device="cpu", workers=1, rounds=2)
    sim, _ = from_experiment(one)
    params = {name: value for name, value in sim.task.net.initial().items()}
    orders = [Order("train", 1, k, {"params": params}) for k in range(5)]

    class Answers:
        clients = 5

        def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
            for order in orders:
                up = {"params": {name: value + order.client for name, value in params.items()}}
                if order.client == 1:
                    up["params"] = {name: value * float("nan") for name, value in params.items()}
                if order.client == 3:
                    up["extra"] = {"w": torch.zeros(2)}
                refusal = "battery at 5 %" if order.client == 4 else ""
                yield Reply(
                    "train", 1, order.client, {} if refusal else up, {"loss": 1.0, "steps": 2.0}, refusal=refusal
                )

    replies = {reply.client: reply for reply in cluster.Reduced(Answers(), [sim], [True]).handle(orders)}
    assert sorted(replies) == [0, 1, 2, 3, 4]
    sizes = sim.data.train.sizes
    shift = 2 * sizes[2] / (sizes[0] + sizes[2])
    for name, value in params.items():
        assert replies[0].up["params"][name] is replies[2].up["params"][name]
        assert torch.allclose(replies[0].up["params"][name], value + shift, rtol=0, atol=1e-12)
    assert all(bool(value.isnan().all()) for value in replies[1].up["params"].values())
    assert "extra" in replies[3].up
    assert replies[4].refusal


@pytest.mark.parametrize(
    "changes",
    [
        {"method": fs.SCAFFOLD()}, {"method": fs.FedFomo()},
        {"average": "median"}, {"max_norm": 1.0}, {"over_select": 1.5, "profile": "uniform"},
        {"mode": "fedbuff", "profile": "uniform"}, {"attack": "alie", "attackers": 0.2},
    ],
)  # fmt: skip
def test_other_merges_are_not_reduced(changes: dict) -> None:
    sim, _ = from_experiment(fs.Experiment(**{"method": fs.FedAvg(), "clients": 5, "rounds": 2, **changes}))
    assert not cluster.plain(sim)
    assert cluster.plain(from_experiment(fs.Experiment(method=fs.FedAvg(), clients=5, rounds=2))[0])


COMMAND = (
    "compare", "fedavg", "scaffold", "--seeds", "2", "--clients", "6", "--epochs", "1", "--dtype", "float64",
    "--checkpoint-every", "1", "--engine", "stacked",
)  # fmt: skip


def weights(folder: Path, rounds: int) -> dict[str, bytes]:
    files = folder.rglob(f"round-{rounds:06d}.safetensors")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_comparison_is_resumed_on_other_ranks(tmp_path: Path) -> None:
    """Seeds side by side on two ranks, then on three; the checkpoints are those of a comparison in one process."""
    one, spread = tmp_path / "one", tmp_path / "spread"
    subprocess.run(
        [sys.executable, "-m", "fedstill", *COMMAND, "--rounds", "4", "--out", str(one)],
        check=True, capture_output=True, env=ENV,
    )  # fmt: skip
    words = ("--rounds", "2", "--transport", "cluster", "--reduce", "off", "--out", str(spread))
    done = torchrun(2, "-m", "fedstill", *COMMAND, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    done = torchrun(
        3, "-m", "fedstill", "resume", str(spread), "--rounds", "4", "--transport", "cluster", "--reduce", "off"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(weights(one, 4)) == 4
    assert weights(one, 4) == weights(spread, 4)


def test_more_ranks_than_clients_are_refused() -> None:
    done = torchrun(3, "-m", "fedstill", "run", "fedavg", "--clients", "2", "--transport", "cluster")
    assert "clients = 2: should be at least 3, the number of ranks: each holds at least one" in done.stderr


def test_without_torchrun_it_is_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "fedstill", "run", "fedavg", "--transport", "cluster"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV)
    assert done.returncode == 2
    assert done.stderr == (
        "fedstill: transport = 'cluster': should be used under torchrun (RANK is not set): "
        "torchrun --nproc-per-node 2 -m fedstill run …\n"
    )
    command[-1:] = ["local", "--backend", "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV)
    assert done.stderr == "fedstill: --backend = 'gloo': should be left out without --transport cluster\n"


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has MPI")
def test_mpi_is_refused_in_one_line_where_torch_has_none() -> None:
    done = torchrun(1, "-m", "fedstill", "run", "fedavg", "--transport", "cluster", "--backend", "mpi")
    line = "fedstill: backend = 'mpi': should be gloo or nccl: this torch was built without MPI"
    assert [text for text in done.stderr.splitlines() if text.startswith("fedstill: ")] == [line]


@pytest.mark.parametrize(
    "flags",
    ["--mode fedbuff --buffer 2 --participation 0.7", "--wait-free until-download"],
    ids=["fedbuff", "wait-free"],
)
def test_simulated_time_passes_alike_on_ranks(flags: str, tmp_path: Path) -> None:
    words = (
        "run", "ditto", "--clients", "6", "--rounds", "4", "--epochs", "1", "--dtype", "float64", "--engine", "one",
        "--profile", "lognormal:0.6", *flags.split(),
    )  # fmt: skip
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    done = torchrun(2, "-m", "fedstill", *words, "--transport", "cluster", "--out", str(tmp_path / "spread"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(weights(tmp_path / "one", 4)) == 1
    assert weights(tmp_path / "one", 4) == weights(tmp_path / "spread", 4)
    times = [
        [json.loads(line)["time"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "spread")
    ]
    assert times[0] == times[1]


def test_real_seconds_are_a_deployments() -> None:
    done = torchrun(
        1, "-m", "fedstill", "run", "ditto", "--mode", "fedbuff", "--profile", "real", "--transport", "cluster"
    )
    assert "profile = 'real': should be 'uniform'" in done.stderr


def test_the_table_for_many_ranks_is_what_passes_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MB, 100 ranks: 7 models down the tree, 99 up; or those of 10 clients each."""
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "benchmarks"))
    bench = importlib.import_module("cluster")
    assert bench.moved(100, 8e6) == (7 + 99) * 8e6
    assert bench.moved(100, 8e6, 10) == (7 + 990) * 8e6
    row = next(line for line in bench.taken(8e6) if line.startswith("| 100 |"))
    cells = [float(cell.removesuffix(" s ")) for cell in row.split("|")[2:-1]]
    assert cells == pytest.approx([n * 8e6 / rate for n in (106, 997) for rate in (0.125e9, 1.25e9, 12.5e9)], rel=5e-3)
    row = next(line for line in bench.taken(8e6, 10.0) if line.startswith("| 100 |"))
    assert row.split("|")[2].strip() == f"{6.784 / 16.784:.1%}"


# ---- messages --------------------------------------------------------------------------------------------------------
def test_what_all_are_sent_lies_once_in_a_parcel() -> None:
    w, own = torch.randn(3, 4, dtype=torch.float64), [torch.arange(k + 1) for k in range(3)]
    box = parcel.Parcel()
    for k in range(3):
        box.add(Order("train", 1, k, {"params": {"w": w, "t": w.T}, "own": own[k], "empty": torch.zeros(0)}))
    assert sum(t.data_ptr() == w.data_ptr() and t.shape == w.shape for t in box.tensors) == 1
    cpu = torch.device("cpu")
    layout, row = parcel.layout(box.tensors), parcel.join(box.tensors, cpu)
    assert row.numel() == parcel.size(layout)
    header = parcel.decode(parcel.encode({"messages": box.messages, "layout": layout}))
    orders = parcel.unpack(header["messages"], dict(enumerate(parcel.part(row, header["layout"], cpu))), Order)
    for k, order in enumerate(orders):
        assert (order.client, order.generic, order.kind) == (k, None, "train")
        assert torch.equal(order.down["params"]["w"], w)
        assert torch.equal(order.down["params"]["t"], w.T)
        assert torch.equal(order.down["own"], own[k])


def test_every_dtype_travels() -> None:
    kinds = (torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.complex128)
    up = {str(kind): torch.tensor([0, 1, 1]).to(kind) for kind in kinds}
    box = parcel.Parcel()
    box.add(Reply("train", 1, 0, {**up, "scalar": torch.tensor(2.5)}, {"loss": 1.5}))
    cpu = torch.device("cpu")
    tensors = parcel.part(parcel.join(box.tensors, cpu), parcel.layout(box.tensors), cpu)
    (reply,) = parcel.unpack(box.messages, dict(enumerate(tensors)), Reply)
    assert reply.report == {"loss": 1.5}
    assert all(torch.equal(reply.up[name], value) and reply.up[name].dtype == value.dtype for name, value in up.items())
    assert float(reply.up["scalar"]) == 2.5


def test_a_share_holds_its_clients_only() -> None:
    one = fs.Experiment(method=fs.FedAvg(), clients=5)
    whole = federation_of(one)
    share = whole.only({1, 3})
    assert [len(c.y_train) > 0 for c in share.clients] == [False, True, False, True, False]
    assert share.sizes("train") == tuple(len(c.y_train) for c in whole.clients)
    assert share.checksum() == whole.checksum()
    data = prepare(one.method, models.build("mlp", whole.shape, whole.classes, 0), share, None, one.training()).data
    x, y = data.train.of(3)
    assert len(x) == len(y) == len(whole.clients[3].y_train)
    with pytest.raises(fs.InputError, match="client = 2: should be one whose samples this process holds"):
        data.train.of(2)
    with pytest.raises(fs.InputError, match="client = 0"):
        data.test.all()


# ---- a rank that dies ------------------------------------------------------------------------------------------------
def pid_of(rank: int, out: Path) -> int:
    """Return the process of a rank of the run that writes into a folder."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            mine = str(out).encode() in words and b"torch.distributed.run" not in words
            if mine and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def test_a_dead_rank_ends_the_run_at_once_and_it_goes_on(tmp_path: Path) -> None:
    one, killed = tmp_path / "one", tmp_path / "killed"
    settings = (
        "scaffold",
        "--clients",
        "6",
        "--rounds",
        "24",
        "--epochs",
        "2",
        "--dtype",
        "float64",
        "--checkpoint-every",
        "1",
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "-m",
        "fedstill",
        "run",
        *settings,
    ]
    run = subprocess.Popen(
        [*launch, "--transport", "cluster", "--out", str(killed)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENV,
    )  # fmt: skip
    metrics, end = killed / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < end and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.05)
    os.kill(pid_of(2, killed), signal.SIGKILL)
    began = time.monotonic()
    said = run.communicate(timeout=60)[1]
    assert time.monotonic() - began < 15
    assert run.returncode != 0
    assert f"'fedstill resume {killed} --transport cluster' goes on, on any number of ranks" in said
    # Rank 1 notices that rank 2 is gone and ends too, sometimes before rank 0 speaks.
    assert re.search(r"fedstill: ranks? (1 and )?2 of the cluster do(es)? not answer any more", said), said
    done = torchrun(2, "-m", "fedstill", "resume", str(killed), "--transport", "cluster")
    assert done.returncode == 0, done.stderr[-2000:]
    alone = [sys.executable, "-m", "fedstill", "run", *settings, "--out", str(one)]
    subprocess.run(alone, check=True, capture_output=True, env=ENV)
    assert len(weights(one, 24)) == 1
    assert weights(one, 24) == weights(killed, 24)
