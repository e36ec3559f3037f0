"""The page of results in a real browser: figures and tables are there, nothing overflows, nothing complains."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from fedstill.cli import main
from fedstill.report.html import page as html

from ..chromium import Page, opened

ROOT = Path(__file__).parents[2]
WIDTHS = (390, 1440)
OVERFLOWING = """
[...document.querySelectorAll("main *, header *")]
  .filter((e) => !e.closest(".scroll") && !e.closest("svg") && e.getClientRects().length)
  .filter((e) => e.getBoundingClientRect().right > WIDTH + 0.5 || e.getBoundingClientRect().left < -0.5)
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)
"""
CLIPPED = """
[...document.querySelectorAll("svg.fig")].filter((f) => f.getClientRects().length).flatMap((f) => {
  const [, , width, height] = f.getAttribute("viewBox").split(" ").map(Number);
  return [...f.querySelectorAll("text")].filter((t) => {
    const b = t.getBBox();
    return b.x < -1 || b.y < -1 || b.x + b.width > width + 1 || b.y + b.height > height + 1;
  }).map((t) => `${f.getAttribute("aria-label")}: ${t.textContent}`);
})
"""
OVERLAPPING = """
[...document.querySelectorAll("svg.fig")].filter((f) => f.getClientRects().length).flatMap((f) => {
  const boxes = [...f.querySelectorAll("text")].map((t) => [t.textContent, t.getBBox()]);
  const found = [];
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const x = Math.min(p.x + p.width, q.x + q.width) - Math.max(p.x, q.x);
    const y = Math.min(p.y + p.height, q.y + q.height) - Math.max(p.y, q.y);
    if (x > 1 && y > 4) found.push(`${f.getAttribute("aria-label")}: ${a} | ${b}`);
  }));
  return found;
})
"""
SMALLEST = """
Math.min(...[...document.querySelectorAll("svg.fig text")].filter((t) => t.getClientRects().length)
  .map((t) => 12 * t.ownerSVGElement.getBoundingClientRect().width / t.ownerSVGElement.viewBox.baseVal.width))
"""
# the contrast of every text with the page, by WCAG 2's formula
CONTRAST = """
(() => {
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number).map(linear);
  const light = (c) => { const [r, g, b] = rgb(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratio = (c) => { const l = light(c); return (Math.max(l, paper) + 0.05) / (Math.min(l, paper) + 0.05); };
  const named = "p, td, th, li, h1, h2, h3, figcaption, button, a, strong";
  const words = [...document.querySelectorAll(named)].map((e) => getComputedStyle(e).color);
  const figures = [...document.querySelectorAll("svg.fig text:not([class^=on-])")].map((e) => getComputedStyle(e).fill);
  return Math.min(...[...words, ...figures].map(ratio));
})()
"""


def overflowing(page: Page, width: int) -> list[str]:
    """The elements that reach beyond the page's sides."""
    return list(page.run(OVERFLOWING.replace("WIDTH", str(width))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder for each kind of report."""
    out = tmp_path_factory.mktemp("report")
    few = ["--rounds", "3", "--clients", "6", "--epochs", "2"]
    runs = {
        "compared": ["compare", "local", "fedavg", "pfedsd", *few, "--seeds", "2"],
        "swept": ["sweep", "fedprox", "mu=0,0.1,1", *few],
        "scored": ["compare", "local", "fedavg", *few, "--score-model", "generic", "--score-round", "mean10"],
        "grid": ["sweep", "pfedsd", "lam=0.1,1", "tau=1,3", *few],
        "attacked": ["compare", "ditto", *few, "--attack", "sign-flip", "--attackers", "2", "--average", "median"],
        "timed": ["run", "pfedsd", *few, "--profile", "lognormal:0.5", "--drop", "0.2", "--deadline", "2"],
    }
    for name, argv in runs.items():
        assert main([*argv, "--out", str(out / name)]) == 0
    cells = ["--only", "synthetic-mlr,fedavg,pfedkd-wcl", "--scale", "0.01", "--seeds", "2", "--device", "cpu"]
    assert main(["reproduce", "pfedkd-wcl/table1", "pfedkd-wcl/fig5", *cells, "--out", str(out / "papers")]) == 0
    papers = {id: out / "papers" / "pfedkd-wcl" / f"{id}-scale-0.01" for id in ("table1", "fig5")}
    return {**{name: out / name for name in runs}, **papers}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened() as tab:
        yield tab


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["compared", "scored", "swept", "grid", "attacked", "timed", "table1", "fig5"])
def test_nothing_overflows_is_clipped_or_complains(name: str, width: int, dark: bool, folders, page, tmp_path) -> None:
    page.open(f"file://{folders[name]}/report.html", width, dark=dark)
    assert page.messages == []
    assert page.run("document.documentElement.scrollWidth") == width
    assert overflowing(page, width) == []
    assert page.run(CLIPPED) == []
    assert page.run(OVERLAPPING) == []
    assert page.run(SMALLEST) >= 11.5  # pixels of the figures' text
    assert page.run(CONTRAST) >= 4.5  # WCAG AA
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 30_000
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_the_checks_can_fail(folders, page) -> None:
    page.open(f"file://{folders['compared']}/report.html", 390)
    page.run(
        """(() => { const f = document.querySelector("#curves-0 .narrow svg"), t = f.querySelector("text");
        const far = t.cloneNode(true), wide = document.createElement("div");
        far.setAttribute("x", 340); far.removeAttribute("text-anchor");
        far.textContent = "far too long"; f.append(far, t.cloneNode(true));
        wide.textContent = "wide"; wide.style.width = "900px"; document.querySelector("main").append(wide); })()"""
    )
    assert page.run("document.documentElement.scrollWidth") > 390
    assert len(overflowing(page, 390)) == 1
    assert len(page.run(CLIPPED)) == 1
    assert len(page.run(OVERLAPPING)) >= 1
    page.run("console.error('seen')")
    assert page.messages == ["error: ['seen']"]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_method_at_once(width: int, page, tmp_path) -> None:
    spec = importlib.util.spec_from_file_location("report_benchmark", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.fabricate(tmp_path / "all", clients=30, methods=26, seeds=1, rounds=12)
    file = html.write([tmp_path / "all"])
    assert file.stat().st_size < 5e6
    page.open(f"file://{file}", width)
    assert page.messages == []
    assert page.run("document.documentElement.scrollWidth") == width
    assert overflowing(page, width) == []
    assert page.run(CLIPPED) == []
    assert page.run(OVERLAPPING) == []
    assert page.run("document.querySelectorAll('#curves-0 .wide path.line').length") == 26
    coloured = "document.querySelectorAll('#curves-0 .wide path.line:not(.sx)').length"
    assert page.run(coloured) <= 7


def test_figures_and_tables_are_really_there(folders, page) -> None:
    page.open(f"file://{folders['compared']}/report.html", 1440)
    rows = page.run("[...document.querySelectorAll('#results tbody tr')].map((r) => r.innerText.split('\\t')[0])")
    assert sorted(re.sub(" †", "", row) for row in rows) == ["fedavg", "local", "pfedsd"]
    for figure, least in (("verdicts", 2), ("gains", 12), ("curves", 3), ("clients", 3), ("cdf", 3), ("holdings", 10)):
        marks = page.run(
            f"""[...document.querySelectorAll("#{figure} .pane:not([hidden]) .wide svg :is(path, rect, circle)")]
            .filter((e) => e.getBoundingClientRect().width + e.getBoundingClientRect().height > 1).length"""
        )
        assert marks >= least, figure
        box = page.run(
            f"Object.values(document.querySelector('#{figure} .wide svg').getBoundingClientRect().toJSON()).slice(2, 4)"
        )
        assert box[0] > 900
        assert box[1] > 60
    assert page.run("document.querySelectorAll('#section-made tr').length") > 60
    page.open(f"file://{folders['timed']}/report.html", 1440)
    assert page.run("document.querySelectorAll('#timeline .wide .bar').length") > 12
    page.open(f"file://{folders['swept']}/report.html", 1440)
    assert page.run("document.querySelectorAll('#sweep .wide circle').length") == 3


def test_the_axis_of_the_curves_can_be_switched(folders, page) -> None:
    page.open(f"file://{folders['compared']}/report.html", 1440)
    shown = "[...document.querySelectorAll('#curves .pane')].map((p) => getComputedStyle(p).display !== 'none')"
    assert page.run(shown) == [True, False, False]
    page.run("document.querySelector('[data-pane=curves-1]').click()")
    assert page.run(shown) == [False, True, False]
    assert "megabytes sent" in page.run("document.querySelector('#curves-1 .wide').textContent")


def test_the_pointer_shows_numbers(folders, page) -> None:
    page.open(f"file://{folders['compared']}/report.html", 1440)
    at = """(() => { const f = document.querySelector("#curves-0 .wide svg"); f.scrollIntoView({block: "center"});
      const p = f.querySelector("path[data-series=pfedsd]");
      const q = p.getPointAtLength(p.getTotalLength()).matrixTransform(f.getScreenCTM());
      return [q.x - 2, q.y]; })()"""
    x, y = page.run(at)
    page.point(x, y)
    tip = page.run("document.getElementById('tip').textContent")
    table = page.run("document.querySelector('#curves .gets a').href")
    last = next(row.split(",") for row in reversed(unquote(table).splitlines()) if row.startswith("pfedsd,3,"))
    assert re.fullmatch(r"(pfedsd|local|fedavg): \d+\.\d\d %, round 3", tip)
    if tip.startswith("pfedsd"):
        assert float(tip.split()[1]) == pytest.approx(float(last[2]), abs=0.06)
    x, y = page.run(
        """(() => { const f = document.querySelector("#gains .wide svg"); f.scrollIntoView({block: "center"});
        const b = f.querySelector("g.client circle").getBoundingClientRect();
        return [b.x + b.width / 2, b.y + b.height / 2]; })()"""
    )
    page.point(x, y)
    tip = page.run("document.getElementById('tip').textContent")
    assert re.match(r"client \d, seed \d: (join|undecided|stay local); ", tip)
    assert page.messages == []


def test_the_theme_can_be_changed(folders, page) -> None:
    page.open(f"file://{folders['compared']}/report.html", 1440, dark=True)
    page.run("document.getElementById('theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("document.getElementById('theme').textContent") == "Dark"


def test_figures_and_tables_can_be_taken_away(folders, page) -> None:
    page.open(f"file://{folders['compared']}/report.html", 1440, dark=True)
    page.run("HTMLAnchorElement.prototype.click = function () { window.taken = [this.download, this.href]; }")
    page.run("document.querySelector('[data-svg=curves]').click()")
    name, href = page.run("window.taken")
    assert name == "curves.svg"
    drawn = unquote(href.partition(",")[2])
    assert "var(--s0)" not in drawn
    assert "#0072b2" in drawn  # the light theme's colours, whatever the page has
    page.open(href, 1440)
    assert page.run("document.querySelectorAll('path').length") > 3
    page.open(f"file://{folders['compared']}/report.html", 1440)
    tables = page.run("[...document.querySelectorAll('#results .gets a')].map((a) => a.href)")
    plain, latex, markdown = (unquote(table.partition(",")[2]) for table in tables)
    assert plain.startswith("method,personal %")
    assert r"\toprule" in latex
    assert markdown.startswith("| method | personal % |")
