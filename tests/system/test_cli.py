"""The command in this process: what it prints, what it leaves, and how it refuses."""

import datetime
import json
import shutil
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import COMMANDS, dated, main
from fedstill.cli.show import PARTITIONS
from fedstill.data.partition import KINDS
from fedstill.methods import METHODS
from fedstill.models import MODELS
from fedstill.run import prepare

TINY = ["--rounds", "2", "--clients", "4", "--epochs", "1"]


class Noon(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None) -> datetime.datetime:
        return cls(2026, 11, 19, 14, 12)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics(folder: str) -> list[dict]:
    """The records without their times."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.endswith("seconds")} for line in lines]


def refused(capsys, *argv: str, status: int = 2) -> str:
    """The one line of a refusal that leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert err.startswith("fedstill: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert sorted(Path().rglob("*")) == before
    return err.removeprefix("fedstill: ").strip()


def test_run_prints_the_table_and_writes_nothing(capsys) -> None:
    assert main(["run", "pfedsd", *TINY, "--lam", "0.7"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "personal model, all clients, mean per client, last round" in out
    assert out.strip().splitlines()[-1].startswith("nothing was written: --out FOLDER")
    assert list(Path().iterdir()) == []


def test_run_makes_a_dated_folder_and_says_so_first(capsys, monkeypatch) -> None:
    """A second run in the same minute gets one of its own; a refusal leaves nothing."""
    monkeypatch.delenv("FEDSTILL_RUNS")
    monkeypatch.setattr(dated, "datetime", Noon)
    assert "epochs" in refused(capsys, "run", "fedavg", "--epochs", "0")
    assert "no-such" in refused(capsys, "run", "fedavg", "--data", "no-such")
    for suffix in ("", "-2"):
        assert main(["run", "fedavg", *TINY]) == 0
        folder = f"runs/2026-11-19-1412-fedavg{suffix}"
        out = capsys.readouterr().out
        assert out.startswith(f"results: {folder}/ (--out FOLDER names another, --no-out writes nothing)\n")
        assert f"saved in {folder}\n" in out
        assert len(metrics(folder)) == 2
    assert main(["resume", "runs/2026-11-19-1412-fedavg"]) == 0
    assert main(["sweep", "fedprox", "mu=0,1", *TINY, "--rounds", "1"]) == 0
    assert Path("runs/2026-11-19-1412-sweep-fedprox/mu=0/experiment.toml").is_file()
    monkeypatch.setenv("FEDSTILL_RUNS", "other/place")
    assert main(["compare", "fedavg", "local", *TINY, "--rounds", "1"]) == 0
    assert Path("other/place/2026-11-19-1412-compare/local/experiment.toml").is_file()
    assert len(list(Path("runs").iterdir())) == 3


@pytest.mark.parametrize("words", [["--no-out"], ["--out", "none"]])
def test_nothing_is_written_where_that_is_asked_for(words: list[str], capsys, monkeypatch) -> None:
    monkeypatch.delenv("FEDSTILL_RUNS")
    assert main(["run", "fedavg", *TINY, "--rounds", "1", *words]) == 0
    assert "results: " not in capsys.readouterr().out
    assert list(Path().iterdir()) == []
    assert "--out is x" in refused(capsys, "run", "fedavg", "--no-out", "--out", "x")


def test_the_default_folder_must_be_writable(capsys, monkeypatch) -> None:
    monkeypatch.delenv("FEDSTILL_RUNS")
    Path("runs").write_text("a file")
    assert refused(capsys, "run", "fedavg", *TINY).endswith("; or --no-out")


def test_run_keeps_a_folder_with_the_flags_in_it(capsys) -> None:
    assert main(["run", "pfedsd", *TINY, "--lam", "0.7", "--nesterov", "--head", "fc2", "--out", "kept/deep"]) == 0
    experiment = fs.Experiment.from_toml("kept/deep/experiment.toml")
    assert experiment == fs.Experiment(
        method=fs.PFedSD(lam=0.7),
        rounds=2,
        clients=4,
        epochs=1,
        nesterov=True,
        head=("fc2",),
        partition="dirichlet:0.1",
    )
    assert len(metrics("kept/deep")) == 2
    assert Path("kept/deep/figure.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "picture: kept/deep/figure.png" in said
    assert "report: kept/deep/report.html" in said
    assert "fedstill run " in Path("kept/deep/report.html").read_text(encoding="utf-8")


def test_a_kept_experiment_runs_again_and_flags_override_it() -> None:
    assert main(["run", "fedprox", *TINY, "--mu", "0.3", "--out", "a"]) == 0
    assert main(["run", "a/experiment.toml", "--out", "b"]) == 0
    assert metrics("a") == metrics("b")
    assert main(["run", "a/experiment.toml", "--rounds", "1", "--mu", "0.5", "--out", "c"]) == 0
    changed = fs.Experiment.from_toml("c/experiment.toml")
    assert (changed.rounds, changed.method, changed.clients) == (1, fs.FedProx(mu=0.5), 4)


def test_several_seeds_have_folders_of_their_own(capsys) -> None:
    assert main(["run", "fedavg", *TINY, "--seed", "3", "--seeds", "2", "--out", "many"]) == 0
    names = ["figure.png", "job.json", "report.html", "seed-3", "seed-4", "summary.json"]
    assert sorted(p.name for p in Path("many").iterdir()) == names
    assert fs.Experiment.from_toml("many/seed-4/experiment.toml").seed == 4
    assert "over seeds (n − 1)" in capsys.readouterr().out
    runs = json.loads(Path("many/summary.json").read_text())["methods"]["fedavg"]["runs"]
    alone = fs.run(fs.Experiment.from_toml("many/seed-4/experiment.toml"))
    assert runs[1]["personal"] == alone.score()


def test_resume_gives_the_same_numbers_as_never_stopping(capsys) -> None:
    flags = [*TINY, "--rounds", "4", "--checkpoint-every", "1"]
    assert main(["run", "pfedsd", *flags, "--out", "whole"]) == 0
    shutil.copytree("whole", "cut")
    for last in Path("cut/checkpoints").glob("round-000004.*"):
        last.unlink()
    records = Path("cut/metrics.jsonl").read_text().splitlines()
    Path("cut/metrics.jsonl").write_text("\n".join(records[:3]) + "\n" + records[3][:20])  # as a kill may leave it
    capsys.readouterr()
    assert main(["resume", "cut"]) == 0
    assert "round 4/4" in capsys.readouterr().out
    assert metrics("cut") == metrics("whole")
    assert main(["resume", "cut"]) == 0
    assert "all 4 rounds were done already" in capsys.readouterr().out


def test_compare_shares_everything_but_the_method(capsys) -> None:
    assert (
        main(["compare", "local", "fedprox", "pfedsd", *TINY, "--mu", "0.2", "--mean", "weighted", "--out", "c"]) == 0
    )
    out = capsys.readouterr().out
    assert "* best personal accuracy" in out
    found = json.loads(Path("c/summary.json").read_text())
    assert list(found["methods"]) == ["local", "fedprox", "pfedsd"]
    assert found["finished"] is True
    assert found["contract"] == str(fs.Evaluation())
    assert found["methods"]["fedprox"]["settings"] == {"id": "fedprox", "mean": "weighted", "mu": 0.2}
    assert found["methods"]["pfedsd"]["settings"]["mean"] == "weighted"
    for name, method in found["methods"].items():
        assert method["runs"][0]["folder"] == name
        assert method["personal"]["mean"] == metrics(f"c/{name}")[-1]["personal"]
    assert len({Path(f"c/{name}/partition.json").read_bytes() for name in found["methods"]}) == 1
    assert json.loads(Path("c/local/partition.json").read_text())["hash"] == found["partition_hashes"][0]
    assert Path("c/figure.png").exists()
    alone = fs.run(fs.Experiment.from_toml("c/pfedsd/experiment.toml"))
    assert alone.score() == found["methods"]["pfedsd"]["personal"]["mean"]


def test_compare_prints_a_handful_of_lines_a_method(capsys) -> None:
    assert main(["compare", "local", "fedavg", *TINY, "--rounds", "30"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "round " in line]
    assert len(lines) == 12
    assert lines[5].startswith("local   round 30/30")
    assert lines[5].endswith("in all")


def test_compare_all_and_none(capsys) -> None:
    assert main(["compare", "all", *TINY, "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert {name for name in METHODS if f"\n{name} " in out} == {n for n, cls in METHODS.items() if not cls.needs_lora}
    assert main(["compare", *TINY, "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if "round 1/1" in line} == {
        "local",
        "fedavg",
        "fedrep",
        "pfedsd",
    }


def test_a_method_that_fails_does_not_stop_the_others(capsys) -> None:
    assert main(["compare", "fedprox", "local", *TINY, "--mu", "1e30", "--out", "c"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("fedstill: fedprox, seed 0: round 1, client ")
    assert err.count("\n") == 1
    assert "\nlocal" in out
    found = json.loads(Path("c/summary.json").read_text())
    assert (found["finished"], list(found["failed"])) == (False, ["fedprox"])


def test_training_that_diverges_is_one_line(capsys) -> None:
    assert main(["run", "fedavg", *TINY, "--lr", "1e30"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_demo_replaces_only_a_demo(capsys) -> None:
    assert main(["demo", *TINY]) == 0
    assert "picture: fedstill-demo/figure.png" in capsys.readouterr().out
    assert main(["demo", *TINY, "--rounds", "1"]) == 0
    assert len(metrics("fedstill-demo/local")) == 1
    Path("fedstill-demo/mine.txt").write_text("notes")
    assert "mine.txt is not part of one" in refused(capsys, "demo", *TINY)
    Path("other").mkdir()
    Path("other/summary.json").write_text('{"mine": 1}')
    assert "an earlier demo" in refused(capsys, "demo", *TINY, "--out", "other")


def test_a_demo_that_was_killed_at_any_point_can_be_given_again_or_resumed(capsys, monkeypatch) -> None:
    Path("fedstill-demo").mkdir()
    Path("fedstill-demo/.lock").touch()  # killed before it had begun
    assert main(["demo", *TINY, "--rounds", "1"]) == 0

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    removal = shutil.rmtree  # killed while the earlier one is removed: its summary is still there
    monkeypatch.setattr(
        shutil, "rmtree", lambda path: killed(path) if Path(path).name == "fedstill-demo" else removal(path)
    )
    main(["demo", *TINY, "--rounds", "1"])
    assert not Path("fedstill-demo/local").exists()
    monkeypatch.undo()
    assert main(["demo", *TINY, "--rounds", "1"]) == 0
    for path in Path("fedstill-demo").iterdir():  # killed between the two files that say what it is
        if path.name != "job.json":
            removal(path) if path.is_dir() else path.unlink()
    Path("fedstill-demo/.lock").touch()
    capsys.readouterr()
    assert "'fedstill resume fedstill-demo' goes on" in refused(capsys, "demo", *TINY)
    assert main(["resume", "fedstill-demo"]) == 0
    assert len(metrics("fedstill-demo/local")) == 1


def test_a_demo_with_bad_input_leaves_the_earlier_one(capsys) -> None:
    assert main(["demo", *TINY]) == 0
    capsys.readouterr()
    assert "--partition" in refused(capsys, "demo", *TINY, "--partition", "dirichlett:1")
    assert "--model" in refused(capsys, "demo", "--model", "mpl")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("rnu pfedsd", "command = 'rnu': should be 'run'?"),
        ("run", "method = nothing: should be a method"),
        ("run pfedsdd", "'pfedsd'?"),
        ("run pfedsd fedavg", "'fedstill compare' runs several methods"),
        ("run pfedsd --bach-size 3 --out q", "flag = --bach-size: should be --batch-size?"),
        ("run pfedsd --lr fast --out q", "--lr = 'fast': should be a number above 0"),
        ("run pfedsd --lr 0 --out q", "--lr = 0.0: should be a number above 0"),
        ("run pfedsd --tau 0 --out q", "--tau = 0.0: should be a number above 0"),
        ("run fedavg --mu 3 --out q", "flag = --mu: should be left out for fedavg: it is a flag of fedprox"),
        ("compare fedavg local --mu 3 --out q", "it is a flag of fedprox"),
        ("compare fedavg pfedsdd --out q", "'pfedsd'?"),
        ("run pfedsd --data digitz --out q", "--data = 'digitz': should be 'digits'?"),
        ("run pfedsd --model mlpp --out q", "--model = 'mlpp'"),
        ("run pfedsd --clients 5000 --out q", "--clients = 5000"),
        ("run pfedsd --partition shards:0 --out q", "shards"),
        ("run pfedsd --device tpu --out q", "--device = 'tpu'"),
        ("run fedrep --head nowhere --out q", "head"),
        ("compare local fedrep --head nowhere --out q", "head"),
        ("run pfedsd --seeds 0 --out q", "--seeds = '0': should be a whole number at least 1"),
        ("run pfedsd --out /proc/nothing/here", "--out = '/proc/nothing/here'"),
        ("run missing.toml", "missing.toml"),
        ("resume", "folder = nothing"),
        ("resume nowhere", "which holds experiment.toml"),
        ("methods pfedsdd", "'pfedsd'?"),
        ("models mlp", "left out"),
        ("data shwo", "'show'?"),
        ("data show --out who.gif", "--out = 'who.gif'"),
        ("data show --out no/where.png", "a folder that exists"),
        ("data show --partition classes:11", "--partition = 'classes:11'"),
        ("demo pfedsd", "'fedstill compare METHOD…'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(capsys, line: str, part: str) -> None:
    assert part in refused(capsys, *line.split())


def test_a_toml_file_with_mistakes_is_refused(capsys) -> None:
    Path("bad.toml").write_text("roundz = 3\n")
    assert "'rounds'?" in refused(capsys, "run", "bad.toml")
    Path("bad.toml").write_text("rounds = = 3\n")
    assert "valid TOML" in refused(capsys, "run", "bad.toml")


def test_a_folder_that_holds_something_is_refused(capsys) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("notes")
    for command in (["run", "pfedsd"], ["compare", "local", "fedavg"]):
        assert "new or empty" in refused(capsys, *command, *TINY, "--out", "full")


def test_the_lists_name_all_there_is(capsys) -> None:
    for command, names in (
        (["methods"], METHODS),
        (["models"], MODELS),
        (["data"], ["digits", "mnist", "cifar100", "synthetic", *KINDS]),
        ([], COMMANDS),
    ):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in names)
    assert {name.partition(":")[0] for name in PARTITIONS} == {"auto", *KINDS}
    assert main(["methods", "pfedsd"]) == 0
    out = capsys.readouterr().out
    assert "KL( q_τ(v_k)" in out
    assert "--tau" in out


@pytest.mark.parametrize("command", [*COMMANDS, "data show"])
def test_help_says_what_a_command_does(capsys, command: str) -> None:
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: fedstill {command}")
    assert "examples:" in out


def test_help_of_one_method_has_its_flags_only(capsys) -> None:
    assert main(["run", "pfedsd", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--tau" in out
    assert "--mu X" not in out


def test_data_show_draws_who_has_what(capsys) -> None:
    assert main(["data", "show", "--clients", "5", "--partition", "classes:2", "--out", "who.png"]) == 0
    out = capsys.readouterr().out
    assert out.count("client ") >= 5
    assert "classes a client: 2 to 2" in out
    assert prepare.federation_of(fs.Experiment(clients=5, partition="classes:2")).hash in out
    assert Path("who.png").read_bytes().startswith(b"\x89PNG")
