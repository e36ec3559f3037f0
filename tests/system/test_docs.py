"""The documents keep their word: code compiles, commands parse, pages agree with the code, the example obeys the laws."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import fedstill as fs
from fedstill.cli import main, show, train
from fedstill.core import own, settings
from fedstill.data.partition import parse
from fedstill.data.split import parse_split
from fedstill.methods import METHODS
from fedstill.models import LIBRARIES, MODELS
from fedstill.models.arguments import parse as parse_arguments
from fedstill.testing import check

from .. import problems
from ..laws.table import stationary_alone

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "new_method.py"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
METHOD_PAGES = ROOT / "docs" / "methods"


# ---- what is in the pages ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """A fenced block. `note` is what an HTML comment on the line above says: `file: PATH` (a file of the repository has the same
    text), `write: NAME` (a reader saves it under this name), `uv` or `fragment`."""

    page: str
    line: int
    language: str
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


FENCE = re.compile(r"(?:^<!-- *(?P<note>.*?) *-->\n)?^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, m.start()) + 1, m["language"], m["note"] or "", m["text"])
        for m in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def commands() -> list[tuple[str, list[str]]]:
    """Every line of a shell block that calls fedstill: where it stands, and its arguments."""
    found = []
    for block in BLOCKS:
        if block.language not in ("sh", "bash", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?fedstill\b(.*)", line)
            if match:
                words = shlex.split(match[1], comments=True)
                ends = [i for i, word in enumerate(words) if word in ("&&", "|", ">", ";")]
                found.append((f"{block}: fedstill{match[1]}", words[: ends[0]] if ends else words))
    return found


COMMANDS = commands()


def test_the_pages_are_read() -> None:
    """Guards the tests below against finding nothing."""
    assert {block.language for block in BLOCKS} >= {"python", "sh", "console", "text"}
    assert len(COMMANDS) > 15
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), page


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python" and b.note != "fragment"], ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


class Checked(Exception):
    """A command got as far as it should: what comes next would read data or train."""


def check_experiment(experiment: fs.Experiment) -> None:
    if experiment.partition != "auto":
        parse(experiment.partition)
    parse_split(experiment.split)
    known = experiment.model in MODELS or experiment.model.partition(":")[0] in LIBRARIES
    assert known or own.is_reference(experiment.model)
    parse_arguments(experiment.model_args)


@pytest.mark.parametrize(("shown", "words"), COMMANDS, ids=[shown for shown, _ in COMMANDS])
def test_commands_parse(shown: str, words: list[str], tmp_path, registered, monkeypatch, capsys) -> None:
    """Flags and values are those of the command line; nothing is read and nothing is trained."""
    monkeypatch.chdir(tmp_path)
    saved = [b for b in BLOCKS if b.note.startswith("write: ") and shown.startswith(f"{b.page}:")]
    for block in saved:
        (tmp_path / block.note.removeprefix("write: ")).write_text(block.text)

    def stop(experiment: fs.Experiment) -> None:
        check_experiment(experiment)
        raise Checked

    def execute(job, transport=None) -> None:
        for experiment in job.experiments.values():
            check_experiment(experiment)
        raise Checked

    monkeypatch.setattr(train, "execute", execute)
    monkeypatch.setattr(train.models, "settled", str)  # files that a page speaks of are not there
    monkeypatch.setattr(train.weights, "settled", str)
    monkeypatch.setattr(show.prepare, "federation_of", stop)
    assert main([*words, "--help"] if words else []) == 0, capsys.readouterr().err
    if words and words[0] in ("run", "compare", "demo") and not any(word.endswith(".toml") for word in words):
        with pytest.raises(Checked):  # also the values, which --help does not look at
            assert main(words) == 0, capsys.readouterr().err
    elif words[:2] == ["data", "show"]:
        with pytest.raises(Checked):
            assert main(words) == 0, capsys.readouterr().err
    written = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert written == {block.note.removeprefix("write: ") for block in saved}


GENERATED = {"docs/settings.md"}  # pages that the site makes of the code


@pytest.fixture
def registered(monkeypatch) -> Iterator[None]:
    """What a command registers, as a page's own method, goes again."""
    before = dict(METHODS)
    monkeypatch.setattr(own, "_allowed", [False])
    yield
    METHODS.clear()
    METHODS.update(before)


LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        there = (page.parent / target).resolve()
        assert there.exists() or there.relative_to(ROOT).as_posix() in GENERATED, target


# ---- a page a method ---------------------------------------------------------------------------------------------------
RESULT = re.compile(r"^\| [\w-]+ \| \d.*\|$", re.M)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_page(name: str) -> None:
    """Fields, defaults, limits and the number of choices are the code's; the results are the index's."""
    page, index = ((METHOD_PAGES / file).read_text(encoding="utf-8") for file in (f"{name}.md", "README.md"))
    assert f"]({name}.md)" in index
    assert f"fedstill run {name}" in page
    cls = METHODS[name]
    hints = settings.types_of(cls)
    for field in settings.fields_of(cls):
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        takes = f"{settings.kind(hints[field.name])} {settings.limits(field.metadata)}".strip()
        assert f"| `{field.name}` | {default} | {takes} | {field.metadata['help']} |" in page
    choices = page.partition("## Choices")[2].partition("\n## ")[0]
    told = [int(number) for number in re.findall(r"\((\d)\)\s", inspect.getdoc(sys.modules[cls.__module__]) or "")]
    assert [int(number) for number in re.findall(r"^(\d)\. ", choices, re.M)] == told
    rows = RESULT.findall(page)
    assert any(row.startswith(f"| {name} |") for row in rows)
    assert all(row in index for row in rows)


def test_no_page_without_a_method() -> None:
    assert {page.stem for page in METHOD_PAGES.glob("*.md")} <= {"README", "by-idea", *METHODS}


# ---- the example -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("new_method", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.note.startswith("file: ")], ids=str)
def test_a_block_equals_its_file(block: Block) -> None:
    assert block.text == (ROOT / block.note.removeprefix("file: ")).read_text(encoding="utf-8")


def test_the_guide_shows_the_example() -> None:
    assert [b.page for b in BLOCKS if b.note == "file: examples/new_method.py"] == ["docs/new-method.md"]


def test_the_readmes_method_is_the_example() -> None:
    (block,) = [b for b in BLOCKS if b.page == "README.md" and b.note == "write: my_method.py"]
    assert block.text.count("\n") <= 30
    assert block.text in EXAMPLE.read_text(encoding="utf-8")


def test_the_example_runs(tmp_path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fedhold +\d+\.\d\d ± ", done.stdout, re.M)
    assert "personal model, all clients, mean per client, last round" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", problems.MODELS)
def test_the_example_stacked_equals_one(example: ModuleType, model: str) -> None:
    method = example.FedHold(lam=0.7)
    one, stacked = (problems.run(method, model, engine=engine) for engine in ("one", "stacked"))
    assert problems.distance(problems.states(one), problems.states(stacked)) < 1e-10
    for a, b in zip(one.history, stacked.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_the_example_without_its_term_is_fedavg(example: ModuleType, engine: str) -> None:
    ours = problems.states(problems.run(example.FedHold(lam=0), engine=engine))
    theirs = problems.states(problems.run(fs.FedAvg(), engine=engine))
    assert problems.distance(ours, theirs) == 0
    held = problems.states(problems.run(example.FedHold(lam=0.7), engine=engine))
    assert problems.distance(held, theirs) > 1e-4, "the term has no effect"


def test_the_example_obeys_the_laws_in_one_call(example: ModuleType) -> None:
    """As the guide calls it; the laws that it prints are those that there are."""
    report = check(example.FedHold(lam=0.7), neutral={"lam": 0.0}, parent=fs.FedAvg())
    text = (ROOT / "docs/new-method.md").read_text(encoding="utf-8")
    for outcome in report.outcomes:
        assert re.search(rf"^{outcome.law} +{outcome.state} ", text, re.M), outcome.law
    assert f"{report.summary().rpartition(',')[0]}, " in text


def test_the_example_reaches_its_fixed_point(example: ModuleType) -> None:
    stationary_alone(example.FedHold(lam=0.7))


# ---- project files -----------------------------------------------------------------------------------------------------
def test_citation() -> None:
    """No YAML reader is among the dependencies, so the file is kept plain enough to be checked line by line."""
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert not any("\t" in line for line in lines)
    plain = r'[\w-]+:( (?:"[^"]*"|\{[^{}"]*\}|[^\s"{}#\[\]&*!|>%@`:][^"#:]*))?'
    for line in lines:
        assert re.fullmatch(rf" *(?:- )?(?:{plain}|\{{[^{{}}\"]*\}}|[a-z ]+)", line), line
    top = dict(re.findall(r'^([\w-]+): *"?(.*?)"?$', "\n".join(lines), re.M))
    assert top["cff-version"] == "1.2.0"
    assert top["version"] == fs.__version__
    assert top["license"] == "Apache-2.0"
    assert {"message", "title", "authors", "references"} <= top.keys()
    references = "\n".join(lines).partition("\nreferences:\n")[2].split("\n  - type: ")
    assert len(references) == 5
    for reference in references:
        assert all(f"\n    {key}:" in reference for key in ("title", "authors", "year")), reference
        assert "- {family-names: " in reference


def test_notice_names_the_shipped_data() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    told = (ROOT / "src/fedstill/data/digits/ATTRIBUTION.txt").read_text(encoding="utf-8")
    for fact in ("Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0"):
        assert fact in notice
        assert fact in told
