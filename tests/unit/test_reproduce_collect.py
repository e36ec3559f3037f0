"""Pages of measured results are made of the kept files alone, and those in the repository are up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstill import papers
from fedstill.core.errors import InputError
from fedstill.reproduce import collect, write
from fedstill.reproduce.plan import find, plan
from fedstill.reproduce.reading import Reading
from fedstill.reproduce.scale import Scale
from fedstill.reproduce.store import Result
from fedstill.reproduce.verdict import Sample, verdict

ROOT = Path(__file__).parents[2]
COMMAND = "fedstill reproduce pfedsd/table2 --only fmnist --device cuda"


def reproduced(out, only, offset, seeds=2, scale=1.0):
    """Write an exhibit's files as a reproduction does, with numbers `offset` from the published ones."""
    (exhibit,) = find(["pfedsd/table2"])
    planned = plan([exhibit], only, seeds, Scale(scale))
    readings = []
    for cell in planned.chosen[0].cells:
        values = tuple(cell.published + offset + 0.1 * n for n in range(seeds))
        about = {"fedstill": "9.8.7", "torch": "2.x", "device": "a GPU"}
        runs = tuple(
            Result(
                f"run{n}",
                n,
                partition="abcdef0123456789",
                date="2031-02-03 04:05:06Z",
                command=COMMAND,
                environment=about,
            )
            for n in range(seeds)
        )
        judged = verdict(Sample(cell.published, cell.spread, 3), Sample.of(values))
        readings.append(Reading(cell, seeds, values=values, results=runs, verdict=judged))
    write.write(out, exhibit, readings, planned, COMMAND)


def test_every_number_has_its_provenance(tmp_path):
    reproduced(tmp_path / "out", "fmnist", 1.0)
    collect.keep(tmp_path / "out", tmp_path / "results")
    pages = collect.pages(collect.load(tmp_path / "results"))
    page = pages["pfedsd.md"]
    for cell in papers.exhibit("pfedsd/table2").cells:
        if cell.setting.startswith("fmnist"):
            assert (
                f"| {cell.id} | {cell.published:.2f} ± {cell.spread:.2f} | {cell.published + 1.05:.2f} ± 0.07 | 2 |"
                in page
            )
            assert f"| {cell.id} | 1 | `abcdef012345` | 9.8.7 | 2.x | a GPU | 2031-02-03 |" in page
    assert f"`{COMMAND}`" in page
    assert "[pfedsd/table2](pfedsd.md) | 14 of 42 |" in pages["README.md"]


def test_what_is_measured_later_is_added(tmp_path):
    results = tmp_path / "results"
    reproduced(tmp_path / "a", "fmnist,20clients", 1.0)
    reproduced(tmp_path / "b", "fmnist,20clients,fedavg,pfedsd", 2.0, seeds=3)
    reproduced(tmp_path / "c", "fmnist,20clients,pfedsd", 5.0, seeds=1)
    reproduced(tmp_path / "d", "fmnist,100clients,pfedsd", 7.0, scale=0.5)
    for name in "abcd":
        collect.keep(tmp_path / name, results)
    (record,) = collect.load(results)
    offsets = {cell["id"]: round(cell["values"][0] - cell["published"]) for cell in record["cells"]}
    assert offsets["fmnist-dirichlet-20/fedper"] == 1
    assert offsets["fmnist-dirichlet-20/fedavg"] == 2  # more seeds
    assert offsets["fmnist-dirichlet-20/pfedsd"] == 2  # not fewer
    assert len(offsets) == 7  # nothing scaled


def test_the_readme_has_the_table_between_its_marks(tmp_path):
    text = f"before\n{collect.BEGIN}\nwhat it was\n{collect.END}\nafter\n"
    reproduced(tmp_path / "out", "fmnist", 1.0)
    collect.keep(tmp_path / "out", tmp_path / "results")
    records = collect.load(tmp_path / "results")
    made = collect.with_table(text, records)
    assert "what it was" not in made
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert "| [pfedsd/table2](docs/results/pfedsd.md) | 14 of 42 |" in made
    assert collect.with_table(made, records) == made
    with pytest.raises(InputError, match="marks"):
        collect.with_table("no marks", records)


def test_a_damaged_file_is_named(tmp_path):
    folder = tmp_path / collect.DATA
    folder.mkdir()
    (folder / "x.json").write_text("{")
    with pytest.raises(InputError, match=r"x\.json"):
        collect.load(tmp_path)
    (folder / "x.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match="format"):
        collect.load(tmp_path)


def test_the_pages_of_the_repository_are_up_to_date():
    folder = ROOT / "docs" / "results"
    records = collect.load(folder)
    for name, text in collect.pages(records).items():
        assert (folder / name).read_text(encoding="utf-8") == text, "python benchmarks/results.py writes it"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert collect.with_table(readme, records) == readme, "python benchmarks/results.py writes it"
