"""What a round costs: FLOPs by hand and by algebra, bytes from the trees that travel, time that adds up."""

from __future__ import annotations

import functools
import json
import struct

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fedstill as fs
from fedstill import methods, models
from fedstill.cli import main
from fedstill.engine import flops
from fedstill.engine.flops import Flops
from fedstill.report import costs, published
from fedstill.run import accounting
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.transport import wire
from fedstill.transport.local import LocalTransport

from ..problems import CLASSES, WIRED, finish, make, needed, ragged

N, BATCH, EPOCHS = 10, 4, 5  # three batches an epoch, the last of two samples
# Plain is 4 → 6 → 3. A multiply-add is 2 FLOPs: forward 2·(24 + 18); backward 2·24 for fc1's weights (nobody asks for the
# gradient of a sample), 2·18 each for fc2's weights and for what goes into it.
PLAIN = Flops(84, 120)
# Convolved: 4 kernels of 2×2 at 3×3 places, then 36 → 3.
CONVOLVED = Flops(2 * 4 * 4 * 9 + 2 * 108, 2 * 4 * 4 * 9 + 4 * 108)
# pFedSD's CNN for CIFAR-100, multiply-adds by layer.
CIFAR = (28 * 28 * 64 * 75, 10 * 10 * 128 * 1600, 3200 * 256, 256 * 128, 128 * 100)


def run(method: fs.Method, model: nn.Module | None = None, shape=(4,), sizes=None, classes=CLASSES, **more) -> fs.Run:
    data = ragged(sizes or ((N, 3),) * 4, shape)
    data = fs.Federation(data.clients, classes, data.name, data.hash, partition_record=data.partition_record)
    how = {"rounds": 3, "epochs": EPOCHS, "batch_size": BATCH, "lr": 0.01, "eval_every": 3, "engine": "one"}
    how |= {**needed(method), **more}
    return fs.simulate(method, model=model or make("plain"), data=data, **how)


def work(method: fs.Method, **more) -> flops.RoundFlops:
    found = run(method, **more).cost
    assert found.work is not None, found.uncounted
    return found.work


# ---- FLOPs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("model", "a_sample"), [("plain", PLAIN), ("convolved", CONVOLVED)])
def test_a_round_of_fedavg_by_hand(model: str, a_sample: Flops) -> None:
    found = work(fs.FedAvg(), model=make(model))
    assert found.phases == (a_sample.times(N * EPOCHS),)
    assert found.begin == found.finish == Flops()


def test_the_papers_cnn_by_hand() -> None:
    net = models.build("cnn-cifar100", (3, 32, 32), 100)
    found = work(fs.FedAvg(), model=net, shape=(3, 32, 32), classes=100, epochs=1, rounds=1)
    forward = 2 * sum(CIFAR)
    assert found.total == Flops(N * forward, N * (2 * forward - 2 * CIFAR[0]))


def test_torchs_own_counter_agrees() -> None:
    ready = run(fs.FedAvg(), make("convolved"), epochs=1, batch_size=N)
    bench, memory = ready.trainer.bench, ready.memory(0)
    down = ready.method.send(ready.task, ready.server, 0)
    with FlopCounterMode(display=False) as oracle:
        ours = flops.count(bench, 1, down, memory, N, fake=False)
    assert ours.work.total.total == oracle.get_total_flops() > 0


@pytest.mark.parametrize("name", methods.METHODS)
@pytest.mark.parametrize("model", ["plain", "convolved"])
def test_fake_tensors_and_zeros_give_the_same_count(name: str, model: str) -> None:
    ready = run(methods.get(name)(), make(model), epochs=1)
    bench, memory = ready.trainer.bench, ready.memory(0)
    down = ready.method.send(ready.task, ready.server, 0)
    fake, real = (flops._count(bench, 3, down, memory, N, 0, kind) for kind in (True, False))
    assert fake.work == real.work
    assert real.work.total.forward > 0
    assert accounting.numbers(fake.up) == accounting.numbers(real.up)


def test_one_pass_of_the_teacher() -> None:
    """pFedSD runs its past model once: a fifth of five epochs' forward passes, 1/15 where a step is three of them (+6.7 %)."""
    plain, teacher = work(fs.FedAvg()), work(fs.PFedSD())
    assert teacher.phases == plain.phases
    assert teacher.begin == Flops(forward=N * PLAIN.forward)
    assert teacher.begin.forward / plain.total.forward == 1 / 5
    assert teacher.begin.forward / (3 * plain.total.forward) == pytest.approx(1 / 15)
    kept = work(fs.PFedSD(teacher="predictions"))
    assert (kept.begin, kept.finish) == (Flops(), teacher.begin)  # the same pass, after training


def test_the_papers_numbers_come_out_of_its_rule() -> None:
    """Multiply-adds with convolutions' biases, three forward passes a step: 906.15 and 966.56 G for 2,400 samples."""
    forward = sum(CIFAR) + 28 * 28 * 64 + 10 * 10 * 128
    training = 3 * 5 * 2400 * forward
    assert [round(g / 1e9, 2) for g in (training, training + 2400 * forward)] == [906.15, 966.56]
    assert published.ROWS["pfedsd"].gigaflops == (906.15, 966.56)
    numbers = sum(p.numel() for p in models.build("cnn-cifar100", (3, 32, 32), 100).parameters())
    head = 128 * 100 + 100
    sent = {"fedavg": 2 * numbers, "fedper": 2 * (numbers - head), "lg-fedavg": 2 * head, "fedfomo": 7 * numbers}
    for name, count in sent.items():
        assert published.ROWS[name].megabytes == pytest.approx(count / 1e6, abs=0.006)


@pytest.mark.parametrize(
    ("method", "times"),
    [
        (fs.PerFedAvg(), 2),  # ∇f(w; D) and ∇f(w̃; D′)
        (fs.PerFedAvg(variant="hf"), 5),  # ∇f(w̃; D′) once for g and once for SGD, and two more for the difference
        (fs.PFedMe(k=1), 1),
        (fs.PFedMe(k=3), 3),
        (fs.Ditto(), 2),
        (fs.APFL(), 2),
        (fs.SCAFFOLD(), 1),
        (fs.FedProx(), 1),  # terms on weights are elementwise
    ],
    ids=str,
)
def test_so_many_gradients_a_batch(method: fs.Method, times: int) -> None:
    assert work(method).total == PLAIN.times(times * N * EPOCHS)


def test_a_frozen_body_has_no_backward_pass() -> None:
    head, body = work(fs.FedRep(head_epochs=2, body_epochs=1)).phases
    assert head == Flops(84, 2 * 18).times(2 * N)
    assert body == Flops(84, 2 * 24 + 2 * 18).times(N)  # through the head, whose weights stand still


def test_a_gradient_for_each_sample_is_no_more_than_one_for_all() -> None:
    """The Fisher diagonal; torch's counter takes grouped convolutions' backward several times over."""
    assert work(fs.PFedSD(regulariser="ewc"), model=make("convolved")).finish == CONVOLVED.times(N)


def test_fourier_transforms_are_counted() -> None:
    with_term, without = (work(fs.SpectralCoDistillation(lam_g=lam, lam_p=lam)) for lam in (0.1, 0.0))
    d, steps = 51, 3  # steps an epoch, with a real transform each; one more of the model that does not move
    more = with_term.phases[0].forward - without.phases[0].forward
    assert more == pytest.approx((steps + 1) * 2.5 * d * np.log2(d))


def test_drawn_epochs_count_by_their_mean() -> None:
    found = run(fs.L2GD(), rounds=20, eval_every=20)
    assert found.cost.steps == np.mean([record["steps"] / 4 for record in found.history])
    assert found.cost.work is not None
    assert found.cost.work.total.total == pytest.approx(PLAIN.total * N * found.cost.steps / 3)


def test_counting_leaves_everything_as_it_was() -> None:
    one, other = (run(fs.PFedSD(), make("convolved"), rounds=2, eval_every=2) for _ in range(2))
    net, before = one.task.net, torch.get_rng_state()
    how = net.execution
    assert one.cost.flops is not None
    assert torch.equal(before, torch.get_rng_state())
    assert how is net.execution
    assert one.fine_tuned(1, "all") == other.fine_tuned(1, "all")
    for k in range(4):
        assert all(torch.equal(a, other.personal(k)[n]) for n, a in one.personal(k).items())
    assert one.cost is one.cost  # once a run


def test_a_method_that_cannot_be_counted_does_not_lose_the_run(monkeypatch) -> None:
    ready = run(fs.FedAvg())

    def refuse(*args, **more):
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(accounting.flops, "count", refuse)
    assert ready.cost.flops is None
    assert ready.cost.uncounted == "RuntimeError: no"
    assert "FLOPs could not be counted: fedavg (RuntimeError: no)" in ready.table()


# ---- bytes -------------------------------------------------------------------------------------------------------------
MODEL, HEAD, NUMBER = 4 * 51, 4 * 21, 4  # bytes of Plain in float32, of its head, of one number


def payload(message) -> int:
    """The bytes of a message's tensors as the wire has them: what follows both headers."""
    data = wire.encode(message)
    (header,) = struct.unpack_from("<Q", data)
    (names,) = struct.unpack_from("<Q", data, 8 + header)
    return len(data) - 16 - header - names


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (fs.Local(), 0, 0),
        (fs.FedAvg(), MODEL, MODEL),
        (fs.PFedSD(), MODEL, MODEL),
        (fs.PFedSD(teacher="predictions"), MODEL, MODEL),
        (fs.PFedSD(stateless=True), 2 * MODEL + NUMBER, MODEL),  # v_k, and whether there is one
        (fs.FedPer(), MODEL - HEAD, MODEL - HEAD),
        (fs.FedRep(), MODEL - HEAD, MODEL - HEAD),
        (fs.LGFedAvg(), HEAD, HEAD),
        (fs.SCAFFOLD(), 2 * MODEL, 2 * MODEL),
        (fs.FedFomo(m=2), 2 * MODEL + 2 * NUMBER, MODEL + 2 * NUMBER),  # whose models they are; the weights
        (fs.FedGKD(), 2 * MODEL, MODEL),  # from round 3 on
    ],
    ids=str,
)
def test_bytes_are_those_on_the_wire(method: fs.Method, down: int, up: int) -> None:
    sent, came = [], []

    class Scales(LocalTransport):
        def dispatch(self, orders):
            sent.extend((order.round, payload(order)) for order in orders if order.kind == "train")
            super().dispatch(orders)

        def replies(self, timeout=None):
            for reply in super().replies(timeout):
                if reply.kind == "train":
                    came.append((reply.round, payload(reply)))
                yield reply

    training = Training(rounds=3, epochs=1, lr=0.01, participation=0.5, engine="one")
    ready = prepare(method, make("plain"), ragged(), None, training)
    done = finish(ready, functools.partial(Scales, through_wire=True))
    for record in done.history:
        t = record["round"]
        assert record["bytes_down"] == np.mean([size for r, size in sent if r == t])
        assert record["bytes_up"] == np.mean([size for r, size in came if r == t])
        assert record["bytes_total"] == sum(size for r, size in (*sent, *came) if r == t)
    last = done.history[-1]
    assert (last["bytes_down"], last["bytes_up"]) == (down, up)
    sent_last = method.send(done.task, done.server, 0)
    assert accounting.numbers(sent_last) * NUMBER == down
    assert done.cost.numbers_up == up / NUMBER


def test_the_same_bytes_without_the_wire_and_stacked() -> None:
    keys = ("bytes_down", "bytes_up", "bytes_total")
    for name in ("pfedsd", "fedfomo", "cd2-pfed"):
        one, stacked = (run(methods.get(name)(), engine=engine) for engine in ("one", "stacked"))
        assert [[r[k] for k in keys] for r in one.history] == [[r[k] for k in keys] for r in stacked.history]
        assert one.cost.work == stacked.cost.work


# ---- time --------------------------------------------------------------------------------------------------------------
def test_a_rounds_time_is_divided() -> None:
    ready = prepare(fs.FedAvg(), make("plain"), ragged(), None, Training(rounds=3, epochs=1, lr=0.01, engine="one"))
    for wired in (False, True):
        for record in finish(ready, WIRED if wired else None).history:
            parts = [record[f"{name}_seconds"] for name in ("communication", "client", "server")]
            assert sum(parts) == pytest.approx(record["train_seconds"], abs=1e-6)
            assert parts[1] > 0
            assert parts[2] > 0
            assert (parts[0] > 0) is wired


# ---- what is printed ---------------------------------------------------------------------------------------------------
def test_the_table_and_the_summary_say_what_a_round_costs() -> None:
    found = run(fs.FedAvg())
    lines = found.table().splitlines()
    assert lines[0].split()[-4:] == ["steps", "kFLOPs", "B", "seconds"]
    # 15 steps; 50 samples of 204 FLOPs; a model down and one up
    assert lines[2].split()[-4:-1] == ["15", "10.2", "408"]
    assert any(line.startswith("steps, kFLOPs, B: one participant in a round; ") for line in lines)
    record = json.loads(json.dumps(found.cost.to_dict()))
    assert record["steps"] == 15
    assert record["flops"] == {"forward": 4200.0, "backward": 6000.0, "total": 10200.0}
    assert (record["bytes_down"], record["bytes_up"]) == (MODEL, MODEL)


def test_units() -> None:
    assert costs.scaled("FLOPs", [2e9, 1.5e10, None]) == ("GFLOPs", ["2", "15", "–"])
    assert costs.scaled("B", [0.0, 999.0]) == ("B", ["0", "999"])
    assert costs.scaled("B", [5160.0, 38440.0]) == ("kB", ["5.16", "38.4"])


def test_the_command_counts_and_measures(capsys) -> None:
    assert main(["costs", "fedavg", "per-fedavg", "lg-fedavg", "--rounds", "2", "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert "s a round  communication %  client %  server %" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.count(".") > 3}
    assert rows["per-fedavg"][4] == "2.00"
    assert rows["lg-fedavg"][5:] == ["5.16", "5.16", "2.58"]
    assert "paper: s" not in out
    assert "--data cifar100 --model cnn-cifar100" in out


def test_the_command_in_the_papers_setting(capsys, tmp_path) -> None:
    """Without time, so nothing is trained at length; the paper's numbers beside ours, and why they differ."""
    x, y = np.zeros((1000, 3, 32, 32), np.uint8), np.arange(1000) % 100
    np.savez(tmp_path / "c.npz", x=x, y=y)
    words = [
        "--model",
        "cnn-cifar100",
        "--clients",
        "20",
        "--participation",
        "0.6",
        "--batch-size",
        "64",
        "--partition",
        "iid",
        "--no-time",
    ]
    assert main(["costs", "fedavg", "pfedsd", "fedrep", "--data", str(tmp_path / "c.npz"), *words]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.count(".") > 3}
    by_rule = {name: 3 * 5 * 40 * sum(CIFAR) / 1e9 * part for name, part in (("fedavg", 1), ("pfedsd", 16 / 15))}
    assert rows["fedavg"][5:] == ["4.30", "4.30", "2.15", "2.15", "906.15", f"{by_rule['fedavg']:.2f}"]
    assert rows["pfedsd"][-5:] == ["2.15", "906.15", "/", "966.56", f"{by_rule['pfedsd']:.2f}"]
    assert rows["fedrep"][-3:-1] == ["–", "–"]
    assert "2 × 1,075,044 = 2.15 M" in out
    assert "s a round" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "method = nothing: should be one or more methods"),
        (["fedsvg"], "'fedavg'?"),
        (["fedavg", "--mu", "1"], "flag = --mu: should be left out for fedavg"),
        (["fedavg", "--new"], "flag = --new"),
        (["fedavg", "--rounds", "0"], "--rounds"),
    ],
)
def test_the_command_refuses(words: list[str], said: str, capsys) -> None:
    assert main(["costs", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--mode", "fedbuff", "--buffer", "5"], ["--minimum", "5"], ["--wait-free", "until-download"]],
    ids=lambda w: w[0],
)
def test_two_clients_stand_for_all_in_simulated_time_too(words: list[str], capsys) -> None:
    """Without training, whatever was asked of more clients."""
    assert main(["costs", "ditto", "--clients", "6", "--profile", "uniform", "--no-time", *words]) == 0
    out, _ = capsys.readouterr()
    assert ("FLOPs could not be counted (personal steps until" in out) == ("--wait-free" in words)
