"""What a reproduction's pictures show: every kind of figure is drawn, and what was drawn is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill import papers
from fedstill.reproduce import pictures
from fedstill.reproduce.reading import Reading
from fedstill.reproduce.scale import Scale

pytest.importorskip("matplotlib")
WHOLE = Scale()


def readings(exhibit):
    """Return readings of all cells, with numbers of the kind that each cell has."""
    out = []
    for n, cell in enumerate(exhibit.cells):
        values, more = (50.0 + n, 52.0 + n), {}
        if cell.contract.metric == "partition":
            values, more = (), {"counts": np.eye(12, 10, dtype=np.int64) * 7}
        elif cell.contract.metric == "client-accuracies":
            more = {"distribution": (10.0, 20.0, 90.0)}
        elif cell.contract.curve:
            more = {"curves": tuple([(t, value + t) for t in range(1, 6)] for value in values)}
        out.append(Reading(cell, 2, values=values, **more))
    return out


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Return the figure of an exhibit, before it is saved."""

    def draw(name, scale=WHOLE):
        figures: list[Any] = []
        made = pictures._figure

        def noted(width, height):
            figures.append(made(width, height))
            figures[-1].savefig = lambda path: Path(path).touch()
            return figures[-1]

        monkeypatch.setattr(pictures, "_figure", noted)
        exhibit = papers.exhibit(name)
        pictures.draw(exhibit, readings(exhibit), scale, tmp_path)
        return figures[0]

    return draw


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_curves_beside_swept_values_are_drawn(drawn):
    """FedBSD's Fig. 4 has panels over S and E, and panels by round."""
    figure = drawn("fedbsd/fig4")
    panels = [axes for axes in figure.axes if axes.axison]
    assert len(panels) == 6
    assert all(axes.lines for axes in panels)


def test_a_published_number_has_the_colour_of_its_curve(drawn):
    axes = drawn("pfedkd-wcl/fig1").axes[0]
    colours = {line.get_label(): line.get_color() for line in axes.lines if not line.get_label().startswith("_")}
    marked = [label for label in colours if label.endswith(", published")]
    assert marked
    assert all(colours[label] == colours[label.removesuffix(", published")] for label in marked)


def test_violins_say_which_line_is_what(drawn):
    figure = drawn("pfedsd/fig7", Scale(0.1))
    assert figure.axes[0].get_ylabel() == "test accuracy (%)"
    assert {"median", "mean"} <= set(legend(figure))
    assert "SCALED to 0.1" in figure.get_suptitle()
    assert "published" not in figure.get_suptitle()  # the paper prints no number there
    (mean,) = [line for line in figure.axes[0].lines if line.get_label() == "mean"]
    assert mean.get_ydata() == pytest.approx([40.0] * 5)


def test_clients_and_classes_are_whole_numbers(drawn):
    axes = drawn("pfedsd/fig5").axes[0]
    assert all(float(tick).is_integer() for tick in (*axes.get_xticks(), *axes.get_yticks()))
    assert len(axes.collections[0].get_offsets()) == 10


def test_a_heat_map_has_every_number_in_its_place(drawn):
    axes = drawn("pfedsd/fig8").axes[0]
    assert np.asarray(axes.images[0].get_array()).tolist() == [[51, 52], [53, 54], [55, 56], [57, 58]]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts[(1, 3)] == "58.00"


def test_no_mark_is_promised_where_nothing_is_published(drawn):
    assert "published" not in legend(drawn("spectral/fig3"))
    assert "published" in legend(drawn("spectral/table5"))


def test_lines_stand_over_their_values(drawn):
    axes = drawn("cd2-pfed/fig5").axes[0]
    assert {tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 6} == {(2, 3, 4, 5, 8, 10)}
