"""The short form of benchmarks/soak_resume.py: kills, damage, full disks, signals; each ends bit-equal or is refused."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import soak_resume


@pytest.mark.parametrize("section", soak_resume.SECTIONS)
def test_the_damage_is_done(section: str) -> None:
    rows = soak_resume.SECTIONS[section](True)
    assert rows
    assert all(len(row) == 3 for row in rows)
