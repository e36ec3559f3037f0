"""The hub's page: what is known of sites and runs, as HTML. Whatever sites have said is text here, never markup.

`look` reads the hub's folder, `part` makes the part of the page that changes, `page` all of it.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import reading
from ..core.metric import Measure, measure_of
from ..core.version import __version__
from . import process
from .folders import Hub
from .jobs import JOB, OUTCOME, RUN, STATUS

MODELS = ("personal", "generic")
STALE = 10.0  # seconds after which a status is old
REFUSALS, RUNS = 20, 8  # shown at most


@dataclass(frozen=True)
class View:
    """What is shown."""

    hub: str
    version: str
    at_work: bool
    at: float  # when the hub last said so
    now: float
    run: str  # the run that goes on, or the last one
    rounds: int
    open: bool  # whether it goes on
    sites: Mapping[str, Mapping[str, Any]]
    revoked: Sequence[str]
    members: Sequence[str]  # sites of the run, by client
    records: Sequence[Mapping[str, Any]]
    refused: Sequence[Mapping[str, Any]]
    runs: Sequence[tuple[str, str]]  # name, and how it ended


def look(hub: Hub) -> View:
    """Read what the hub's process has written."""
    status = _json(hub.folder / STATUS)
    now, jobs = dict(status.get("run") or {}), sorted((hub.folder / "runs").glob(f"*/{JOB}"), key=_changed)
    name = str(now.get("run") or (jobs[-1].parent.name if jobs else ""))
    folder = hub.folder / "runs" / name
    known = {str(k): v for k, v in dict(status.get("sites") or {}).items() if isinstance(v, dict)}
    at_work = bool(process.running(hub.folder))
    nobody: dict[str, Any] = {"state": "never seen"}
    return View(
        hub=hub.name,
        version=str(status.get("version") or __version__),
        at_work=at_work,
        at=float(status.get("at") or 0.0),
        now=time.time(),
        run=name,
        rounds=int(now.get("rounds") or 0),
        open=bool(now) and at_work,
        sites={site: known.get(site, nobody) for site in hub.sites()},
        revoked=sorted(hub.revoked()),
        members=[str(site) for site in _json(folder / JOB).get("sites", [])] if name else [],
        records=_records(folder / RUN / "metrics.jsonl") if name else [],
        refused=[r for r in list(status.get("refused") or [])[-REFUSALS:][::-1] if isinstance(r, dict)],
        runs=[(job.parent.name, _outcome(job.parent)) for job in jobs[-RUNS:][::-1]],
    )


def page(view: View) -> str:
    """Return the whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(view.hub)} · fedstill hub</title>
<link rel="icon" href="/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/style.css">
<noscript><meta http-equiv="refresh" content="5"></noscript>
<script src="/page.js" defer></script>
</head>
<body>
<p id="lost" role="alert" hidden>This page is not up to date: its server does not answer.</p>
<main>
{part(view)}
</main>
</body>
</html>
"""


def part(view: View) -> str:
    """Return what changes: head, run, sites, refusals, runs."""
    return "\n".join([_head(view), _run(view), _sites(view), _refused(view), _runs(view)])


# ---- sections --------------------------------------------------------------------------------------------------------
def _head(view: View) -> str:
    if not view.at_work:
        state, mood = "stopped", "off"
    elif view.now - view.at > STALE:
        state, mood = f"no sign for {_ago(view.now - view.at)}", "bad"
    else:
        state, mood = "at work", "good"
    here = sum(site.get("state") == "here" for site in view.sites.values()) if view.at_work else 0
    summary_line = f"{here} of {len(view.sites)} sites here · fedstill {_text(view.version)} · {_clock(view.now)}"
    return f"""<header>
<h1>{_text(view.hub)} <span class="state {mood}">{_text(state)}</span></h1>
<p class="quiet">{summary_line}</p>
</header>"""


def _run(view: View) -> str:
    if not view.run:
        return (
            '<section id="run"><h2>Run</h2><p class="quiet">No run was handed in yet: fedstill hub run …</p></section>'
        )
    done = len(view.records)
    of = f" of {view.rounds}" if view.rounds else ""
    what = f"round {done}{of}" if view.open or done else "not begun"
    bar = f'<progress value="{done}" max="{view.rounds}">{done} of {view.rounds}</progress>' if view.rounds else ""
    sent = sum(_number(record, "bytes_total") for record in view.records)
    last = view.records[-1] if view.records else {}
    measure = _measure(view.records)
    tiles = [(f"{model} {measure.title}", _score(_latest(view.records, model), measure)) for model in MODELS]
    tiles += [("models sent", _bytes(sent)), ("last round", _seconds(_number(last, "seconds")) if last else "–")]
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in tiles)
    state = '<span class="state good">goes on</span>' if view.open else '<span class="state off">over</span>'
    return f"""<section id="run">
<h2>Run {_text(view.run)} {state}</h2>
<p class="quiet">{what}</p>
{bar}
<dl class="tiles">{cells}</dl>
{_curve(view.records)}
</section>"""


def _sites(view: View) -> str:
    counted, measure = [0] * len(view.members), _measure(view.records)
    for record in view.records:
        for k in record.get("participants", ()):
            if isinstance(k, int) and k < len(counted):
                counted[k] += 1
    clients = {name: k for k, name in enumerate(view.members)}
    rows = []
    for name, site in view.sites.items():
        state = str(site.get("state", "")) if view.at_work else "unknown"
        state = "working" if state == "here" and site.get("works") else state
        mood = {"here": "good", "working": "good", "away": "bad"}.get(state, "off")
        seen = site.get("seen")
        k = clients.get(name)
        own = _latest_of(view.records, k)
        cells = {
            "site": f"<strong>{_text(name)}</strong>",
            "state": f'<span class="state {mood}">{_text(state)}</span>',
            "last seen": _ago(view.now - float(seen)) + " ago" if isinstance(seen, int | float) else "–",
            "samples": _text(f"{site['samples']:,}" if isinstance(site.get("samples"), int) else "–"),
            "rounds": "–" if k is None else f"{counted[k]} of {len(view.records)}",
            measure.title: _score(own, measure),
            "sent to it": _bytes(_number(site, "sent")),
            "received": _bytes(_number(site, "received")),
        }
        rows.append("".join(f'<td data-name="{name}">{cell}</td>' for name, cell in cells.items()))
    heads = ("site", "state", "last seen", "samples", "rounds", measure.title, "sent to it", "received")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    empty = "" if rows else '<p class="quiet">No site was approved yet: fedstill hub approve REQUEST</p>'
    revoked = f'<p class="quiet">Revoked: {_text(", ".join(view.revoked))}</p>' if view.revoked else ""
    return f"""<section id="sites">
<h2>Sites</h2>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
{empty}{revoked}
</section>"""


def _refused(view: View) -> str:
    rows = "".join(
        f'<li><span class="quiet">{_clock(_number(r, "at"))}</span> <strong>{_text(r.get("site"))}</strong> '
        f"{_text(r.get('reason'))}</li>"
        for r in view.refused
    )
    content = f"<ul>{rows}</ul>" if rows else '<p class="quiet">Nothing was refused.</p>'
    return f'<section id="refused"><h2>Refused</h2>{content}</section>'


def _runs(view: View) -> str:
    if not view.runs:
        return ""
    rows = "".join(f"<li><strong>{_text(name)}</strong> {_text(outcome)}</li>" for name, outcome in view.runs)
    return f'<section id="runs"><h2>Runs</h2><ul>{rows}</ul></section>'


def _curve(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the scores by round as a picture, its words outside of it so that they keep their size."""
    lines = {model: _points(records, model) for model in MODELS}
    lines = {model: points for model, points in lines.items() if points}
    if not lines:
        return '<p class="quiet">No round was scored yet.</p>'
    measure, every = _measure(records), [value for points in lines.values() for _, value in points]
    low, high = min(math.floor(10 * min(every)) / 10, 0.9), 1.0
    if not measure.share:
        low, high = min(every), max(every) if max(every) > min(every) else min(every) + 1
    last, drawn, legend = max(len(records), 2), [], []
    for model, points in lines.items():
        places = [(100 * (t - 1) / (last - 1), 100 * (high - value) / (high - low)) for t, value in points]
        places = places if len(places) > 1 else places * 2  # a line of no length is a dot
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        drawn.append(f'<polyline class="{model}" points="{path}"/>')
        legend.append(f'<li class="{model}">{model}</li>')
    grid = "".join(f'<line x1="0" x2="100" y1="{y}" y2="{y}"/>' for y in (0, 50, 100))
    spoken = "; ".join(
        f"{model} {_score(points[-1][1], measure)} after round {points[-1][0]}" for model, points in lines.items()
    )
    marks = "".join(f"<span>{_score(value, measure, 0)}</span>" for value in (high, (high + low) / 2, low))
    return f"""<figure>
<ul class="legend">{"".join(legend)}</ul>
<div class="plot"><div class="marks" aria-hidden="true">{marks}</div>
<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{_text(measure.title)} by round: {_text(spoken)}">
<g class="grid">{grid}</g>{"".join(drawn)}</svg></div>
<div class="rounds" aria-hidden="true"><span>round 1</span><span>{last}</span></div>
</figure>"""


# ---- values ----------------------------------------------------------------------------------------------------------
def _text(value: Any) -> str:
    """Return a value as text in HTML, without control characters or marks that turn the direction of writing."""
    return html.escape("".join(sign if sign.isprintable() else "�" for sign in str(value)[:500]), quote=True)


def _number(of: Mapping[str, Any], name: str) -> float:
    value = of.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _points(records: Sequence[Mapping[str, Any]], model: str) -> list[tuple[int, float]]:
    """Return (round, accuracy or error) of the rounds that were scored."""
    most = 1.0 if _measure(records).share else math.inf
    return [
        (place, float(record[model]))
        for place, record in enumerate(records, 1)
        if isinstance(record.get(model), int | float) and 0 <= record[model] <= most and math.isfinite(record[model])
    ]


def _latest(records: Sequence[Mapping[str, Any]], model: str) -> float | None:
    points = _points(records, model)
    return points[-1][1] if points else None


def _latest_of(records: Sequence[Mapping[str, Any]], client: int | None) -> float | None:
    """Return the accuracy at a client where it was last scored."""
    for record in reversed(records):
        value = dict(record.get("personal_clients") or {}).get(str(client))
        if isinstance(value, int | float):
            return float(value)
    return None


def _measure(records: Sequence[Mapping[str, Any]]) -> Measure:
    """Return what the records' scores are."""
    return measure_of("", next((record for record in records if isinstance(record.get("metric"), str)), None))


def _score(value: float | None, measure: Measure, places: int = 1) -> str:
    return "–" if value is None else f"{measure.text(value, places)}{' %' if measure.share else ''}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


# ---- files -----------------------------------------------------------------------------------------------------------
def _json(path: Path) -> dict[str, Any]:
    try:
        content = reading.read_json(path)
    except reading.Unreadable:
        return {}
    return content if isinstance(content, dict) else {}


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records that were written in full."""
    records = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break
        records.append(record if isinstance(record, dict) else {})
    return records


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _outcome(folder: Path) -> str:
    """Return how a run has ended."""
    outcome = _json(folder / OUTCOME)
    if not outcome:
        return "goes on, or waits"
    return (
        f"done, {outcome.get('rounds', '?')} rounds"
        if outcome.get("ok") and "rounds" in outcome
        else str(outcome.get("why") or "done")
    )
