"""Narrow terminals: a table loses columns, the least important first, and no line is longer than the terminal."""

from __future__ import annotations

import pytest

from fedstill.cli import costs, screen
from fedstill.report.fit import explained, fit, hanging
from fedstill.report.text import aligned

TABLE = [
    ("method", ["pfedkd-wcl server=average lam=0.25 *", "fedavg"]),
    ("personal %", ["96.63 ±  0.80", "68.12 ±  4.57"]),
    ("worst 10 %", ["92.28", "29.06"]),
    ("per sample %", ["96.38", "73.68"]),
    ("generic %", ["12.12", "73.68"]),
    ("new %", ["9.12", "71.68"]),
    ("steps", ["23", "24"]),
    ("MFLOPs", ["14.6", "14.6"]),
    ("kB", ["76.9", "76.9"]),
    ("seconds", ["3.0", "2.0"]),
    ("seeds", ["3", "3"]),
]
FIRST_GONE = ("steps", "MFLOPs", "kB", "seconds", "per sample %", "new %", "worst 10 %", "generic %", "seeds")


@pytest.mark.parametrize("width", range(55, 160, 3))
def test_what_is_shown_fits_and_what_is_left_out_matters_less(width: int) -> None:
    shown, left_out = fit(TABLE, width)
    assert max(map(len, aligned(shown))) <= width
    assert set(left_out) == set(FIRST_GONE[: len(left_out)])
    assert [column for column in TABLE if column in shown] == shown, "their order stays"
    if left_out:  # with the one that was left out last it would not fit
        more = [column for column in TABLE if column in shown or column[0] == FIRST_GONE[len(left_out) - 1]]
        assert max(map(len, aligned(more))) > width


def test_the_method_and_the_score_stay_however_narrow_it_is() -> None:
    assert [heading for heading, _ in fit(TABLE, 10)[0]] == ["method", "personal %"]
    assert fit(TABLE, None) == (TABLE, [])


COSTS = [
    ("method", ["pfedkd-wcl", "fedavg"]),
    ("steps", ["25", "25"]),
    ("GFLOPs", ["14.6", "15.9"]),
    ("forward %", ["47", "51"]),
    ("× fedavg", ["1.00", "1.09"]),
    ("MB down", ["38.4", "38.4"]),
    ("MB up", ["38.4", "38.4"]),
    ("k numbers", ["19.2", "19.2"]),
]
COSTS_GONE = ("k numbers", "forward %", "× fedavg", "steps")


@pytest.mark.parametrize("width", range(30, 85, 5))
def test_costs_keep_flops_and_bytes(width: int) -> None:
    """Units have prefixes by their size; what is left out is in the stated order."""
    shown, left_out = fit(COSTS, width, costs.AMOUNTS)
    assert set(left_out) == set(COSTS_GONE[: len(left_out)])
    assert len(left_out) == len(COSTS_GONE) or max(map(len, aligned(shown))) <= width
    assert {"method", "GFLOPs", "MB down", "MB up"} <= {heading for heading, _ in shown}


def test_columns_with_the_same_heading_are_told_apart() -> None:
    twice = [("method", ["a"]), ("client %", ["11.0"]), ("client %", ["11.0"])]
    assert fit(twice, 20)[0] == twice[:2]


def test_lists_hang_below_their_names() -> None:
    text = hanging("  name  ", "what it is, in more words than there is room for", 30)
    assert text.splitlines() == ["  name  what it is, in more", "        words than there is", "        room for"]
    assert hanging("  name  ", "in a file, one line " * 9, None).count("\n") == 0


def test_what_is_left_out_is_not_explained() -> None:
    notes = ["worst 10 %: mean", "steps, MFLOPs, kB: one", "generic % of fedavg: its", "personal %: x", "* best"]
    assert explained(notes, ["worst 10 %", "steps", "MFLOPs"]) == notes[1:]
    assert explained(notes, ["steps", "MFLOPs", "kB", "generic %"]) == [notes[0], *notes[3:]]


def test_a_terminal_without_rich(monkeypatch, capsys) -> None:
    """The headings that are missing are said, and how to see them; a file, which is no terminal, has all."""
    monkeypatch.setattr(screen, "console", lambda: None)
    for room, wide, gone in ((70, False, True), (70, True, False), (None, False, False)):
        monkeypatch.setattr(screen, "width", lambda room=room: room)
        screen.table(TABLE, [True, False], ["worst 10 %: mean"], wide)
        out = capsys.readouterr().out
        assert ("not in 70 columns: " in out) == ("--wide" in out) == ("kB  " not in out) == gone
        assert "pfedkd-wcl server=average lam=0.25 *" in out
