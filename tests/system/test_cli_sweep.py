"""`fedstill sweep`: several values of one field, equal to runs of their own; one that fails leaves the others alone."""

import json
import time
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.edge.model_store.plain import PlainStore
from fedstill.run import together

from .test_cli import metrics, refused

TINY = ["--rounds", "2", "--clients", "4", "--epochs", "1", "--dtype", "float64"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fleets(monkeypatch) -> list[int]:
    """How many runs go together, each time some do."""
    counts: list[int] = []
    start = together.start

    def counted(starts, *more):
        counts.extend([len(starts)] if len(starts) > 1 else [])
        return start(starts, *more)

    monkeypatch.setattr(together, "start", counted)
    return counts


def same_numbers(a: list[dict], b: list[dict]) -> bool:
    """Whether two runs' records agree: scores exactly, losses to rounding."""
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
    return True


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize(
    ("method", "field", "values"), [("pfedsd", "lam", ("0.1", "2")), ("fedprox", "lr", ("0.01", "0.2", "0.05"))]
)
def test_a_sweep_equals_runs_of_their_own(method, field, values, engine, fleets, capsys) -> None:
    flags = [*TINY, "--engine", engine]
    assert main(["sweep", method, f"{field}={','.join(values)}", *flags, "--seeds", "2", "--out", "all"]) == 0
    assert fleets == ([2 * len(values)] if engine == "stacked" else [])
    out = capsys.readouterr().out
    for value in values:
        assert f"{method} {field}={float(value)}" in out
        for seed in ("0", "1"):
            assert main(["run", method, f"--{field}", value, *flags, "--seed", seed, "--out", f"{value}-{seed}"]) == 0
            assert same_numbers(metrics(f"all/{field}={value}/seed-{seed}"), metrics(f"{value}-{seed}"))
    assert Path("all/figure.png").is_file()


def test_the_summary_says_which_value_is_whose() -> None:
    assert main(["sweep", "fedavg", "batch-size=8,32", *TINY, "--out", "s"]) == 0
    found = json.loads(Path("s/summary.json").read_text())
    assert [one["experiment"] for one in found["methods"].values()] == [{"batch_size": 8}, {"batch_size": 32}]
    assert "batch_size" not in found["experiment"]
    assert (found["command"], found["finished"]) == ("sweep", True)
    assert fs.Experiment.from_toml("s/batch_size=32/experiment.toml").batch_size == 32


def test_a_kept_experiment_is_swept_and_a_run_of_a_sweep_goes_on() -> None:
    assert main(["run", "fedprox", *TINY, "--mu", "0.3", "--out", "a"]) == 0
    assert main(["sweep", "a/experiment.toml", "mu=0,0.3", "--out", "b"]) == 0
    assert same_numbers(metrics("b/mu=0.3"), metrics("a"))
    assert main(["resume", "b/mu=0"]) == 0


def test_fields_that_no_stack_can_vary_go_one_after_another(fleets, capsys) -> None:
    assert main(["sweep", "fedavg", "nesterov=on,off", *TINY, "--engine", "stacked"]) == 0
    out, err = capsys.readouterr()
    assert fleets == [2]
    assert err == "fedstill: the runs go one after another: nesterov differs\n"
    assert "fedavg nesterov=True" in out
    assert "fedavg nesterov=False" in out


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_one_value_that_diverges_leaves_the_others_alone(engine, fleets, capsys) -> None:
    flags = [*TINY, "--engine", engine]
    assert main(["sweep", "fedavg", "lr=1e200,0.1,0.05", *flags, "--out", "all"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("fedstill: lr=1e200, seed 0: round ")
    assert "a smaller lr (now 1e+200) usually helps" in err
    assert all(f"\nfedavg lr={value}" in out for value in (0.1, 0.05))
    assert fleets == ([3] if engine == "stacked" else [])
    assert main(["run", "fedavg", "--lr", "0.05", *flags, "--out", "alone"]) == 0
    assert same_numbers(metrics("all/lr=0.05"), metrics("alone"))
    found = json.loads(Path("all/summary.json").read_text())
    assert list(found["failed"]) == ["lr=1e200"]
    assert not found["finished"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["fedavg", "batch-size=8,16"], "batch_size differs"),
        (["cd2-pfed", "lam=0.5,1"], "cd2-pfed branches on lam"),
    ],
)
def test_where_values_cannot_be_stacked_their_seeds_are(words, why, fleets, capsys) -> None:
    assert main(["sweep", *words, *TINY, "--engine", "stacked", "--seeds", "2", "--out", "all"]) == 0
    out, err = capsys.readouterr()
    assert fleets == [4, 2, 2]
    assert err == f"fedstill: the runs go one after another, seeds together: {why}\n"
    field, _, listed = words[1].replace("-", "_").partition("=")
    for value in listed.split(","):
        assert any(line.startswith(f"{field}={value} ") and "seed 2/2, round 2/2" in line for line in out.splitlines())
        flags = [*TINY, "--engine", "stacked", f"--{field.replace('_', '-')}", value]
        assert main(["run", words[0], *flags, "--seed", "1", "--out", f"alone-{value}"]) == 0
        assert same_numbers(metrics(f"all/{field}={value}/seed-1"), metrics(f"alone-{value}"))


def test_seeds_of_which_some_diverge() -> None:
    """All that failed are named, and nothing is said to be finished."""
    flags = ["--rounds", "3", "--clients", "4", "--epochs", "1", "--engine", "stacked", "--seeds", "4"]
    assert main(["sweep", "fedavg", "lr=1000,0.05", *flags, "--out", "all"]) == 1
    found = json.loads(Path("all/summary.json").read_text())
    assert not found["finished"]
    done = {run["seed"] for run in found["methods"]["lr=1000"]["runs"]}
    said = {seed for seed in range(4) if f"seed {seed}: round " in found["failed"]["lr=1000"]}
    assert said | done == set(range(4))
    assert said
    assert not said & done


def test_a_value_that_is_left_alone_is_named(capsys) -> None:
    assert main(["sweep", "fedprox", "mu=1e200,0.1", *TINY, "--engine", "stacked"]) == 1
    assert "only mu=0.1 finished" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", [["compare", "pfedsd", "fedprox"], ["sweep", "pfedsd", "lam=0.1,1"]])
def test_memories_that_are_lost_stop_their_runs_only(command, monkeypatch, capsys) -> None:
    """The Model Store fails in a later round of pFedSD: its runs have failed, and the command goes on to its report."""
    scatter, calls = PlainStore.scatter, []

    def losing(self, clients, memory, *more):
        calls.extend([1] if memory else [])
        if memory and len(calls) > 1:
            raise fs.TrainingError("client 0: its memory was lost")
        return scatter(self, clients, memory, *more)

    monkeypatch.setattr(PlainStore, "scatter", losing)
    flags = ["--rounds", "3", "--clients", "4", "--epochs", "1", "--engine", "stacked", "--seeds", "2"]
    assert main([*command, *flags, "--out", "all"]) == 1
    out, err = capsys.readouterr()
    assert "its memory was lost" in err
    found = json.loads(Path("all/summary.json").read_text())
    failed, others = (["pfedsd"], ["fedprox"]) if command[0] == "compare" else (["lam=0.1", "lam=1"], [])
    assert list(found["failed"]) == failed
    assert [label for label, one in found["methods"].items() if one["runs"]] == others
    assert ("fedprox" in out.split("worst 10 %")[-1]) == bool(others)


def test_runs_abreast_share_the_time() -> None:
    """The seconds of all values together are not more than the command took."""
    began = time.perf_counter()
    assert main(["sweep", "pfedsd", "lam=0.1,0.5,1", *TINY, "--engine", "stacked", "--out", "all"]) == 0
    took = time.perf_counter() - began
    found = json.loads(Path("all/summary.json").read_text())
    assert 0 < sum(one["runs"][0]["seconds"] for one in found["methods"].values()) < took


def test_a_grid_is_every_combination_in_one_stack(fleets, capsys) -> None:
    words = ["sweep", "pfedsd", "lam=0.1,2", "tau=1,3", *TINY, "--engine", "stacked", "--seeds", "2", "--out", "grid"]
    assert main(words) == 0
    assert fleets == [8]
    printed = capsys.readouterr().out
    found = json.loads(Path("grid/summary.json").read_text())
    labels = [f"lam={lam},tau={tau}" for lam in ("0.1", "2") for tau in ("1", "3")]
    assert list(found["methods"]) == labels
    for label in labels:
        method = found["methods"][label]["settings"]
        assert label == f"lam={method['lam']:g},tau={method['tau']:g}"
        assert f"pfedsd lam={method['lam']} tau={method['tau']}" in printed
    assert Path("grid/sweep.png").stat().st_size > 5_000
    report = Path("grid/report.html").read_text(encoding="utf-8")
    assert report.count('class="heat"') == 2 * len(labels)  # for a screen and for a phone
    assert "Accuracy by lam and tau" in report
    alone = [*TINY, "--engine", "stacked", "--lam", "2", "--tau", "3"]
    assert main(["run", "pfedsd", *alone, "--out", "alone"]) == 0
    assert same_numbers(metrics("grid/lam=2,tau=3/seed-0"), metrics("alone"))
    assert main(["resume", "grid"]) == 0  # nothing is left to do, and the record of it can be read
    assert "by value: grid/sweep.png" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_partitions_and_numbers_of_clients_divide_the_data_anew(engine, capsys) -> None:
    tiny = ["--rounds", "2", "--epochs", "1", "--engine", engine, "--seeds", "2"]
    swept = "partition=shards:2;classes:2,lognormal:1.0"
    assert main(["sweep", "fedavg", swept, "clients=4,6", *tiny, "--out", "data"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(Path("data/summary.json").read_text())
    assert len(found["partition_hashes"]) == len(set(found["partition_hashes"])) == 8
    for partition in ("shards:2", "classes:2,lognormal:1.0"):
        for clients in (4, 6):
            label = f"partition={partition},clients={clients}"
            assert f"fedavg clients={clients} partition={partition}" in printed
            assert len(found["methods"][label]["runs"]) == 2
            for seed in (0, 1):
                experiment = fs.Experiment(
                    method=fs.FedAvg(),
                    rounds=2,
                    epochs=1,
                    engine=engine,
                    seed=seed,
                    partition=partition,
                    clients=clients,
                )
                assert same_numbers(
                    [
                        {k: v for k, v in record.items() if "seconds" not in k}
                        for record in metrics(f"data/{label}/seed-{seed}")
                    ],
                    [{k: v for k, v in record.items() if "seconds" not in k} for record in fs.run(experiment).history],
                )


def test_participation_and_epochs_are_swept(capsys) -> None:
    tiny = ["--rounds", "2", "--clients", "4", "--seeds", "1"]
    assert main(["sweep", "fedavg", "participation=0.5,1", "epochs=1,2", *tiny, "--out", "p"]) == 0
    for share in ("0.5", "1"):
        for epochs in ("1", "2"):
            first = metrics(f"p/participation={share},epochs={epochs}")[0]
            assert len(first["participants"]) == 4 * float(share)
    whole = [metrics(f"p/participation=1,epochs={epochs}")[0]["steps"] for epochs in (1, 2)]
    assert whole[1] == 2 * whole[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pfedsd"], "a method and a field, or two: fedstill sweep pfedsd lam=0.1,0.5,1"),
        (["pfedsd", "lam=1", "tau=2"], "lam = '1': should be two or more values"),
        (["pfedsd", "lam=1,2", "tau=2,3", "lr=1,2"], "a method and a field, or two"),
        (["pfedsd", "lam=1,2", "lam=3,4"], "field = 'lam': should be another one than the other field"),
        (["pfedsd", "partition=iid,file:a/b"], "values without /"),
        (["pfedsd", "partition=iid"], "such as partition=dirichlet:0.1,shards:2"),
        (["pfedsd", "clients=4,5"], "--clients = '4': should be left out"),
        (["pfedsd", "lma=1,2"], "field = 'lma': should be a field of pfedsd or of local training, or participation"),
        (["pfedsd", "lam=1"], "lam = '1': should be two or more values"),
        (["pfedsd", "stateless=on"], "such as stateless=on,off"),
        (["pfedsd", "lam=\uff11,2"], "should be two or more values"),
        (["l2gd", "lam=1,1e9"], "--lam = 1000000000.0: should be at most"),
        (["pfedsd", "lam=1,,2"], "lam = '1,,2': should be two or more values"),
        (["pfedsd", "lam=1,1.0"], "should be values that differ from one another"),
        (["pfedsd", "lam=1,x"], "--lam = 'x': should be a number at least 0"),
        (["pfedsd", "lam=1,-2"], "--lam = -2.0: should be a number at least 0"),
        (["pfedsd", "lam=1,2", "--lam", "3"], "--lam = '3': should be left out: lam is what is swept"),
        (["fedavg", "nesterov=on,perhaps"], "nesterov = 'perhaps': should be on or off"),
        (["fedsd", "lam=1,2"], "method = 'fedsd': should be"),
    ],
)
def test_refusals(words, said, capsys) -> None:
    more = ["--clients", "4"] if words[-1].startswith("clients") else []
    assert said in refused(capsys, "sweep", *words, *more, "--out", "kept")
