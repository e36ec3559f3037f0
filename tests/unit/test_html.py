"""The page of results: markup that cannot be broken out of, scales, tables, and every number from small folders."""

from __future__ import annotations

import doctest
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.report.html import clients, curves, gantt, markup, page, read, results, style, svg, tables, verdicts
from fedstill.report.html.markup import csv, data_uri, tag
from fedstill.report.html.svg import Frame, Scale, path, spread, ticks
from fedstill.report.html.tables import Column, Table

COMPARED = ["compare", "local", "fedavg", "pfedsd", "--rounds", "3", "--epochs", "2", "--clients", "6", "--seeds", "2"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "compared"
    assert main([*COMPARED, "--out", str(out)]) == 0
    return out


class Checked(HTMLParser):
    """Reads a page and notes its elements, and what is not closed."""

    VOID = frozenset({"meta", "br", "path", "rect", "line", "circle", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def test_examples_in_docstrings() -> None:
    for module in (markup, svg, tables):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed


def test_nothing_breaks_out_of_markup() -> None:
    bad = "</td><script>alert('1')</script>\"&"
    text = tag("p", bad, title=bad)
    assert "<script>" not in text
    checked = Checked(text)
    assert checked.tags == [("p", {"title": bad})]
    assert "".join(checked.texts) == bad
    assert unquote(data_uri(f"{bad}\n%", "text/csv").partition(",")[2]) == f"{bad}\n%"


def test_csv_quotes_and_defuses_formulas() -> None:
    rows = [["a,b", 'say "x"', -0.25, 3, None, "=1+1"]]
    assert csv(["n"], rows) == 'n\n"a,b","say ""x""",-0.25,3,,\'=1+1\n'


def test_scales_and_ticks() -> None:
    scale = Scale(10, 20, 100, 0)
    assert [scale(10), scale(15), scale(20)] == [100, 50, 0]
    assert ticks(0, 1, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(92.3, 98.4, 5) == [93.0, 94.0, 95.0, 96.0, 97.0, 98.0]
    assert ticks(-60, 45, 5) == [-60.0, -40.0, -20.0, 0.0, 20.0, 40.0]
    assert ticks(5, 5) == [5]


def test_a_path_comes_back_as_its_points() -> None:
    rng = np.random.default_rng(0)
    points = [(float(x), float(y)) for x, y in rng.uniform(-3, 900, (200, 2))]
    numbers = [float(n) for n in re.findall(r"-?\d*\.?\d+", path(points))]
    at = np.cumsum(np.array(numbers).reshape(-1, 2), axis=0)
    assert np.abs(at - np.array(points)).max() <= 0.0501  # tenths, without errors that add up


def test_labels_do_not_overlap_and_stay_in_order() -> None:
    placed = spread([10, 11, 12, 200, 12.5], 0, 210, gap=15)
    order = np.argsort([10, 11, 12, 200, 12.5], kind="stable")
    assert all(b - a >= 15 for a, b in zip(np.array(placed)[order], np.array(placed)[order][1:], strict=False))
    assert max(placed) <= 210
    assert spread([50, 120], 0, 210) == [50, 120]


def test_a_table_in_every_form() -> None:
    table = Table(
        "t",
        "T",
        [Column("method", ["a_b", "c|d"], left=True), Column("x %", ["1 ± 2", "−3"]), Column("y", ["5", "6"])],
        frozenset([0]),
    )
    assert table.csv() == "method,x %,y\na_b,1 ± 2,5\nc|d,−3,6\n"
    assert table.markdown().splitlines() == [
        "| method | x % | y |", "| :-- | --: | --: |", "| **a_b** | **1 ± 2** | 5 |", "| c\\|d | −3 | 6 |",
    ]  # fmt: skip
    assert table.latex().splitlines() == [
        r"% \usepackage{booktabs}", r"\begin{tabular}{lrr}", r"\toprule", r"method & x \% & y \\", r"\midrule",
        r"\textbf{a\_b} & \textbf{1 $\pm$ 2} & 5 \\", r"c|d & $-$3 & 6 \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_density_is_one_in_all_also_at_the_ends() -> None:
    at = np.linspace(0, 100, 4001)
    for values in (np.array([100.0, 100, 98, 70]), np.array([0.0, 0.5]), np.array([50.0] * 9)):
        assert np.trapezoid(clients.density(values, at), at) == pytest.approx(1, abs=0.01)


def test_the_axis_is_not_squeezed_by_round_1() -> None:
    line = curves.Curve([1, 2, 3, 4, 5, 6, 7, 8], [10.0, 80, 90, 91, 92, 92, 93, 93], None, {})
    low, high, hidden = curves.in_sight({"a": line}, ["a"])
    assert 85 < low < 90 < 93 < high
    assert hidden == 2
    flat = curves.Curve([1, 2, 3, 4], [89.5, 90.0, 91, 92], None, {})
    assert curves.in_sight({"a": flat}, ["a"])[2] == 0
    level = curves.Curve([1, 2, 3], [88.888, 88.889, 88.888], None, {})
    low, high, _ = curves.in_sight({"a": level}, ["a"])
    assert (low, high) == (pytest.approx(87.8885, abs=0.01), pytest.approx(89.8885, abs=0.01))


def test_of_many_methods_the_best_the_baselines_and_those_asked_for_are_in_colour(compared: Path) -> None:
    one = read.read([compared])
    few = style.styles(one)
    assert sorted(few.values()) == ["s0", "s1", "s2"]
    runs = {f"m{i}": one.runs["pfedsd"] for i in range(12)} | {"local": one.runs["local"], "fedavg": one.runs["fedavg"]}
    many = style.styles(read.Study("x", runs), ["m11"])
    chosen = style.coloured(many)
    assert {"m11", "local", "fedavg"} <= set(chosen)
    assert len(chosen) <= style.MOST
    assert len(set(many[label] for label in chosen)) == len(chosen)


def test_the_folder_is_read_as_it_is(compared: Path) -> None:
    study = read.read([compared])
    assert set(study.runs) == {"local", "fedavg", "pfedsd"}
    assert [run.seed for run in study.runs["pfedsd"]] == [0, 1]
    assert study.command == f"fedstill {' '.join(COMPARED)} --out {compared}"
    for label, runs in study.runs.items():
        values = [fs.Evaluation().of([*run.history]) for run in runs]
        assert study.personal(label).value == pytest.approx(np.mean(values))
        assert study.personal(label).spread == pytest.approx(np.std(values, ddof=1))
    assert study.local == "local"
    assert study.first.generic_only == (study.best == "fedavg")


def test_the_curves_are_the_records(compared: Path) -> None:
    study = read.read([compared])
    curve = curves.curve(study.runs["pfedsd"])
    both = np.array([[record["personal"] for record in run.history] for run in study.runs["pfedsd"]])
    assert curve.mean == pytest.approx(100 * both.mean(0))
    assert curve.deviation == pytest.approx(100 * both.std(0, ddof=1))
    megabytes = np.array([[record["bytes_total"] for record in run.history] for run in study.runs["pfedsd"]]) / 1e6
    assert curve.at["megabytes"] == pytest.approx(megabytes.cumsum(1).mean(0))
    assert curve.at["rounds"] == [1, 2, 3]


def test_the_verdicts_are_paired_on_the_same_samples(compared: Path) -> None:
    study = read.read([compared])
    found = verdicts.all_verdicts(study)
    assert set(found) == {"fedavg", "pfedsd"}
    assert all(len(of) == 12 and all(one.paired for one in of) for of in found.values())
    one = found["fedavg"][0]
    record = {name: study.runs[name][0].last["personal_clients"][one.client] for name in ("local", "fedavg")}
    assert (one.local, one.federated) == (record["local"], record["fedavg"])
    table = results.results(study, None, found)
    shown = {column.heading: column.cells for column in table.columns}
    for i, label in enumerate(study.labels):
        if label != "local":
            assert sum(int(shown[side][i]) for side in ("join", "undecided", "stay local")) == 12


def test_other_data_have_no_verdict(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "copy")
    for file in (tmp_path / "copy" / "local").glob("*/partition.json"):
        file.write_text(re.sub(r'"hash": "\w+"', '"hash": "other"', file.read_text()))
    study = read.read([tmp_path / "copy"])
    assert verdicts.all_verdicts(study) == {}
    assert "not comparable client by client" in page.render(study)


def test_the_page_is_whole_and_loads_nothing(compared: Path) -> None:
    text = (compared / "report.html").read_text(encoding="utf-8")
    checked = Checked(text)
    words = " ".join(checked.texts)
    for said in (
        "serves the clients with",
        "Holm's correction for 3 pairs",
        "Tango's score interval",
        "best gain first",
        "Partition hash",
    ):
        assert said in words, said
    names = [attributes.get("id") for _, attributes in checked.tags]
    for name in ("results", "verdicts", "gains", "curves", "clients", "cdf", "holdings", "costs", "every-client"):
        assert names.count(name) == 1, name
    for name, attributes in checked.tags:
        assert not {"onclick", "onload", "style"} & attributes.keys(), name
        for key in ("src", "href"):
            assert key not in attributes or (attributes[key] or "").startswith("data:"), attributes
    policy = next(a["content"] for _, a in checked.tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_same_folder_gives_the_same_page(compared: Path) -> None:
    assert page.render(read.read([compared])) == page.render(read.read([compared]))


def test_one_run_alone_and_a_run_that_is_not_finished(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    shutil.copytree(compared / "pfedsd" / "seed-0", folder)
    text = page.render(read.read([folder]))
    assert "the worst tenth of them with" in text
    assert "generic model" in text
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[0] + "\n")
    text = page.render(read.read([folder]))
    assert "not finished: pfedsd, seed 0: 1 of 3 rounds" in text


def test_labels_that_would_break_out(compared: Path, tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    shutil.copytree(compared / "pfedsd", tmp_path / bad)
    shutil.copytree(compared / "fedavg", tmp_path / "fedavg")
    Checked(page.render(read.read([tmp_path])))
    assert "<img" not in page.render(read.read([tmp_path]))


@pytest.mark.parametrize(
    ("argv", "right"),
    [
        ([], "folders that --out made"),
        (["nowhere"], "a folder that --out made"),
        (["{here}", "{here}"], "each once"),
        (["{here}", "{here}/local"], "a file for the page of several folders"),
        (["{here}", "--out", "page.pdf"], "ends in .html"),
        (["{here}", "--method", "fedavgg"], "fedavg"),
        (["{here}/local/seed-0/checkpoints"], "with a run in it"),
    ],
)
def test_wrong_arguments_end_in_one_line(argv: list[str], right: str, compared: Path, capsys) -> None:
    assert main(["report", *(word.format(here=compared) for word in argv)]) == 2
    line = capsys.readouterr().err
    assert right in line
    assert line.count("\n") == 1


def test_the_command_writes_where_it_is_told(compared: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(compared), "--method", "fedavg", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report: {out}\n"
    assert "Gain of every client from fedavg" in out.read_text(encoding="utf-8")


def test_a_sweep_over_one_field_and_over_two(compared: Path, tmp_path: Path) -> None:
    source = compared / "pfedsd" / "seed-0"
    for lam in (0.1, 0.5, 1.0):
        for tau in (1.0, 3.0):
            folder = tmp_path / "two" / f"lam={lam},tau={tau}"
            shutil.copytree(source, folder)
            text = (folder / "experiment.toml").read_text()
            text = re.sub(r"(?m)^lam = .*", f"lam = {lam}", re.sub(r"(?m)^tau = .*", f"tau = {tau}", text))
            (folder / "experiment.toml").write_text(text)
            if tau == 1.0:
                shutil.copytree(folder, tmp_path / "one" / f"lam={lam}")
    two, one = (page.render(read.read([tmp_path / name])) for name in ("two", "one"))
    assert two.count('class="heat"') == 12  # in both widths
    assert "Accuracy by lam and tau" in two
    assert "Accuracy by lam" in one
    assert 'class="heat"' not in one
    table = results.results(read.read([tmp_path / "two"]), None, {})
    assert table.columns[0].heading == "lam, tau"


def test_frames_leave_room_for_their_axes() -> None:
    frame = Frame.of(350, 200, (0, 1), (0, 100))
    assert frame.x.start > 30
    assert frame.y.start < 200 - 30
    assert frame.y(100) == frame.y.end


@pytest.mark.parametrize("ahead", [False, True])
def test_the_bars_of_a_client_are_where_its_times_say(ahead: bool, compared: Path) -> None:
    line = {
        "round": 1, "start": 10.0, "closed": 19.0, "end": 20.0, "clients": [0], "state": ["merged"], "folded": [], "hold": [0.0],
        "download": [1.0], "generic": [3.0], "personal": [6.0 if ahead else 0.0], "upload": [2.0], "ahead": ahead,
    }  # fmt: skip
    drawn = gantt.draw(read.read([compared]).first, [line], 960)
    bars = {}
    for _, attributes in Checked(drawn).tags:
        if (attributes.get("class") or "").startswith("bar ") and attributes["height"] not in (
            "10",
        ):  # those are the key's
            x, y, width, height = (float(attributes[name] or 0) for name in ("x", "y", "width", "height"))
            bars[attributes["class"]] = ((x - 44) / 90.2, (x + width - 44) / 90.2, y, height)
    spans = {name: pytest.approx(span, abs=0.01) for name, span in {
        "bar s4": (0, 1), "bar s0": (1, 4), "bar s5": (4, 6), "bar wait": (6, 10), **({"bar s3": (4, 10)} if ahead else {}),
    }.items()}  # fmt: skip
    assert {name: (first, last) for name, (first, last, _, _) in bars.items()} == spans
    if ahead:  # messages and waiting above, work below
        assert bars["bar wait"][2] + bars["bar wait"][3] <= bars["bar s3"][2] + 0.05
    else:
        assert len({height for _, _, _, height in bars.values()}) == 1


def stating(source: Path, to: Path, **contract: str) -> read.Study:
    """Copy a folder whose runs then state another contract."""
    shutil.copytree(source, to)
    for file in to.glob("*/*/experiment.toml"):
        text = file.read_text()
        for name, value in contract.items():
            text, count = re.subn(rf'(?m)^score_{name} = ".*"', f'score_{name} = "{value}"', text)
            assert count == 1
        file.write_text(text)
    return read.read([to])


def test_the_score_is_by_the_contract_of_the_folder(compared: Path, tmp_path: Path) -> None:
    study = stating(compared, tmp_path / "copy", round="mean10", mean="sample")
    for label, runs in study.runs.items():
        each = [
            np.mean(
                [np.average([*r["personal_clients"].values()], weights=[*r["samples"].values()]) for r in run.history]
            )
            for run in runs
        ]
        stat = study.score(label)
        assert stat is not None
        assert (stat.value, stat.spread) == pytest.approx((np.mean(each), np.std(each, ddof=1)))
        means = {k: np.mean([r["personal_clients"][k] for r in runs[0].history]) for k in runs[0].last["samples"]}
        assert {k: study.rates()[label][runs[0].seed, k] for k in means} == pytest.approx(means)
    assert study.best == max(study.runs, key=lambda label: study.score(label).value)  # type: ignore[union-attr]
    table = results.results(study, None, {})
    assert [column.heading for column in table.columns][1:3] == ["score %", "personal %"]
    assert table.notes[0] == "score %: personal model, all clients, mean per sample, mean of the last 10 scored rounds"
    text = page.render(study)
    assert "has the best score" in text
    assert "with its personal model, mean of the last 10 scored rounds" in text


def test_a_method_without_such_a_model_has_no_score_and_comes_last(compared: Path, tmp_path: Path) -> None:
    study = stating(compared, tmp_path / "copy", model="generic")
    assert study.score("local") is None
    assert study.labels[-1] == "local"
    assert study.tested == fs.Evaluation()  # all are compared by the model that serves each client
    text = page.render(study)
    assert "Without such a model: local." in text
    assert "generic model, all clients, mean per client, last round" in text


def test_a_contract_that_is_none_gives_one_line(compared: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(fs.InputError, match="model"):
        page.render(stating(compared, tmp_path / "copy", model="best"))


EVIL = "</script></svg></td><script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&=1"


def test_hostile_names_are_text(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(2)>"
    shutil.copytree(compared, folder)
    (folder / "pfedsd").rename(folder / "<script>alert(3)<&")
    for file in folder.glob("*/*/partition.json"):
        record = json.loads(file.read_text())
        names, labels = ([f"{EVIL}{i}" for i in range(n)] for n in (6, 10))
        file.write_text(json.dumps({**record, "names": names, "labels": labels, "kind": EVIL, "hash": EVIL}))
    for file in folder.glob("*/*/environment.json"):
        file.write_text(json.dumps({"platform": EVIL, "device": EVIL}))
    summary = json.loads((folder / "summary.json").read_text())
    told = {"line": f"fedstill {EVIL}", "failed": {EVIL: EVIL}, "scores": {"new": EVIL}}
    (folder / "summary.json").write_text(json.dumps({**summary, **told}))
    checked = Checked(page.render(read.read([folder])))
    usual = Checked(page.render(read.read([compared])))
    names = [name for name, _ in checked.tags]
    assert set(names) <= {"br", *(name for name, _ in usual.tags)}
    assert "img" not in names
    assert names.count("script") == 1
    for _, attributes in checked.tags:
        assert not [name for name in attributes if name.startswith("on")]
    words = " ".join(checked.texts)
    assert f"fedstill {EVIL}" in words  # the command line, as text
    assert f"{EVIL}0" in words  # a client, in the table of verdicts
    assert any(f"class {EVIL}" in (attributes.get("data-tip") or "") for _, attributes in checked.tags)


DAMAGES = {
    "metrics.jsonl": [
        '{"round": 1}',
        '{"round": 1, "personal_clients": []}',
        '{"round": 1, "personal_clients": {"a": "b"}, "seconds": 1}',
        "[1]",
        "",
    ],
    "partition.json": [
        "[]",
        "{",
        '{"names": 3, "labels": {}}',
        '{"hash": {"a": 1}, "names": [1]}',
        '{"labels": [1, []], "names": {"0": 1}}',
    ],
    "environment.json": ["null", '{"python": []}'],
    "experiment.toml": [
        "",
        "seed = 1",
        'seed = 0\nrounds = 3\nscore_model = [1]\n[method]\nid = "local"',
        'seed = "x"\nrounds = 2\n[method]\nid = "a"',
        "[[method]]",
    ],
    "scores.json": ["7", '{"new": "much"}'],
    "timeline.jsonl": ['{"round": 1}', '{"round": 1, "start": "a", "clients": 3}'],
    "answers.json": ["{}", '{"clients": 3}'],
    "../../summary.json": [
        "{",
        '{"format": 1, "fedstill": "x", "methods": {"a": 3}, "failed": 5}',
        '{"format": 1, "fedstill": 3, "methods": {}, "scores": []}',
    ],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in DAMAGES.items() for content in contents]
)
def test_a_damaged_folder_gives_a_page_or_one_line(
    name: str, content: str, compared: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(compared, tmp_path / "copy")
    (tmp_path / "copy" / "local" / "seed-0" / name).write_text(content)
    status = main(["report", str(tmp_path / "copy"), "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr()
    assert status in (0, 2)
    assert (tmp_path / "page.html").exists() == (status == 0)
    if status:
        assert said.err.startswith("fedstill: ")
        assert said.err.count("\n") == 1
