"""The page: the answer, then the sections, in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ...core import files
from ...core.errors import InputError, nearest
from ...core.version import __version__
from ..significance import Differences, differences
from . import answer, attacked, clients, curves, gantt, grid, holdings, results, verdicts
from .markup import Html, escape, join, tag
from .read import Result, Study, read
from .style import styles
from .tables import Table

REPORT = "report.html"
FORBIDDEN = "base-uri 'none'; form-action 'none'"


def write(folders: Sequence[Path], out: Path | None = None, method: str = "", line: str = "") -> Path:
    """Write the report of some folders, by default into the first; return where it is.

    `method` is the one to draw in colour and to show client by client, `line` the command that made the folders.
    """
    target = out or folders[0] / REPORT
    try:
        text = render(read(folders, line), method)
    except InputError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"folders whose files are as fedstill wrote them ({type(error).__name__}: {error})"
        raise InputError("folder", ", ".join(map(str, folders)), reason) from error
    files.write(target, text.encode())
    return target


def render(study: Study, method: str = "") -> str:
    """Return the report of a study."""
    if method and method not in study.runs:
        raise InputError("method", method, nearest(method, study.runs))
    classes = styles(study, [method] if method else [])
    tested = _tested(study)
    found = verdicts.all_verdicts(study)
    shown = method if method in found else next(iter(found), "")
    under_attack = attacked.attacked(study)
    data = holdings.holdings(study.first)
    gantts = [gantt.timeline(study.runs[label][0], label) for label in ([method] if method else study.labels[:1])]
    sections: list[tuple[str, str, Sequence[Html | None]]] = [
        ("results", "", [results.results(study, tested, found).html()]),
        ("attack", "", [None if under_attack is None else under_attack.html()]),
        ("sweep", "", [grid.sweep(study)]),
        ("federation", "Join, or stay local?", [verdicts.section(study, found, shown) if found else None]),
        ("training", "Training", [curves.curves(study, classes)]),
        (
            "all-clients",
            "Clients",
            [clients.clients(study, classes), None if found else clients.listing(study, method or study.best), data],
        ),
        ("classes", "By class", [table.html() for table in results.by_class(study)]),
        ("time", "Simulated time", gantts),
        ("cost", "Costs", [results.costs(study).html()]),
        ("made", "How it was made", [_made(study)]),
    ]
    body = [
        tag("section", tag("h2", title) if title else "", *(part for part in parts if part), id=f"section-{name}")
        for name, title, parts in sections
        if any(parts)
    ]
    title = f"{study.name}: {_kind(study)}"
    lead = answer.answer(study, tested, found, shown)
    if under_attack is not None and (words := attacked.sentence(under_attack, study.plain)):
        lead = tag("p", words, cls="answer")
    top = [lead, *_warnings(study)]
    return document(title, _facts(study), [*top, *body])


def document(title: str, facts: str, body: Sequence[object], live: bool = False) -> str:
    """Return a page with its styles and script; nothing is loaded from anywhere, which a policy in the page enforces.

    A `live` page asks its own server, and no other, for what has changed.
    """
    style, figure, script = (_file(name) for name in ("page.css", "figure.css", "page.js"))
    hashes = " ".join(f"'{_digest(text)}'" for text in (style, figure))
    scripts = [script, *([_file("live.js")] if live else [])]
    runs = " ".join(f"'{_digest(text)}'" for text in scripts)
    policy = f"default-src 'none'; style-src {hashes}; script-src {runs}; img-src data:; {FORBIDDEN}"
    policy += "; connect-src 'self'" if live else ""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"fedstill {__version__}"),
        tag("title", title),
        tag("style", Html(style)),
        tag("style", Html(figure), id="figure-css"),
    )
    theme = tag("button", "Dark", id="theme", type="button", hidden=True, title="Light or dark")
    top = tag("header", tag("div", tag("h1", title), tag("p", facts, cls="facts")), theme, cls="top")
    origin = "This page renews itself." if live else "Everything on this page is in this file."
    footer = tag("footer", f"fedstill {__version__}. {origin}")
    lost = [tag("p", "This page is no longer renewed.", id="lost", cls="warn", hidden=True)] if live else []
    tip = tag("div", id="tip", role="status", hidden=True)
    page = tag(
        "html",
        head,
        tag("body", top, *lost, tag("main", *body), footer, tip, *(tag("script", Html(text)) for text in scripts)),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def of_tables(
    title: str, facts: str, sentences: Sequence[str], tables: Sequence[Table], figures: Sequence[Html] = ()
) -> str:
    """Return a page of tables and figures, such as those of a reproduction, under sentences of one's own."""
    paragraphs = [
        tag("p", sentence, cls="answer" if i == 0 else "answer second") for i, sentence in enumerate(sentences)
    ]
    return document(title, facts, [*paragraphs, *(table.html() for table in tables), *figures])


def _tested(study: Study) -> Differences | None:
    """Return the test of every pair; None for one method."""
    if len(study.runs) < 2:
        return None
    alike = all(run.own_clients for runs in study.runs.values() for run in runs)
    return differences(study.rates(), same_clients=alike)


def _kind(study: Study) -> str:
    methods = list(dict.fromkeys(runs[0].method for runs in study.runs.values()))
    if len(study.runs) == 1:
        return methods[0]
    if any(run.attackers for runs in study.runs.values() for run in runs):
        return f"{', '.join(methods) if len(methods) < 4 else f'{len(methods)} methods'} clean and attacked"
    if len(methods) == 1:
        return f"{methods[0]} by {', '.join(name.removeprefix('method.') for name in study.varying) or 'label'}"
    return f"{len(study.runs)} methods compared"


def _facts(study: Study) -> str:
    first = study.first
    settings, partition = first.settings, first.partition
    parameter = partition.get("parameter")
    kind = f"{partition.get('kind', '')}{'' if parameter is None else f':{parameter}'}"
    clients = max(len(run.last["personal_clients"]) for runs in study.runs.values() for run in runs)
    sites = partition.get("kind") == "sites"
    phrases = [
        "data of the sites" if sites else f"data {settings.get('data', '')}",
        f"{clients} sites" if sites else f"{clients} clients{f' by {kind}' if kind else ''}",
        f"model {settings.get('model', '')}",
        f"{len(first.history)} rounds"
        if not first.settings.get("patience")
        else f"at most {first.settings['rounds']} rounds",
        f"{study.seeds} seed{'s' if study.seeds > 1 else ''}",
    ]
    return " · ".join(phrases)


def _warnings(study: Study) -> list[Html]:
    lines = [f"{label} failed: {reason}" for label, reason in study.failed.items()]
    lines += [f"not finished: {line}" for line in study.unfinished]
    hashes = {run.divided for runs in study.runs.values() for run in runs if run.seed == study.first.seed}
    if len(hashes) > 1:
        lines.append(
            "these runs have other data, or divided it otherwise: their numbers are not comparable client by client"
        )
    return [tag("p", *(join([line, tag("br")]) for line in lines), cls="warn")] if lines else []


def _made(study: Study) -> Html:
    """Return the settings, seeds, hashes, versions and commands."""
    runs = [run for of in study.runs.values() for run in of]
    parts: list[Html] = []
    if study.command:
        parts += [tag("h3", "The command"), tag("pre", study.command)]
    again = f"fedstill run {study.first.where} --out ANOTHER"
    title = f"One run again, from the folder of this report: {study.best}, seed {study.first.seed}"
    if study.first.partition.get("kind") != "sites":  # whose data are nowhere else
        parts += [tag("h3", title), tag("pre", again)]
    shared = {name: value for name, value in _shared(runs).items() if value not in ("", [], None)}
    versions = _together(
        [run.environment for run in runs], ("fedstill", "python", "torch", "numpy", "device", "threads", "platform")
    )
    parts.append(_pairs("Versions and device", versions, open_=True))
    hashes = {
        f"seed {run.seed}": str(run.partition.get("hash") or run.partition.get("contents") or "unknown")
        for run in sorted(runs, key=lambda run: run.seed)
    }
    parts.append(_pairs("Partition hash", hashes, open_=True))
    varying = {
        name.removeprefix("method."): ", ".join(
            f"{label}: {_word(v)}" for label, v in zip(study.runs, values, strict=True) if v is not None
        )
        for name, values in study.varying.items()
        if name != "method.id"
    }
    if varying:
        parts.append(_pairs("Settings in which they differ", varying))
    parts.append(
        _pairs(f"All {len(shared)} settings that they share", {name: _word(value) for name, value in shared.items()})
    )
    return join(parts)


def _shared(runs: Sequence[Result]) -> dict[str, Any]:
    first = {name: value for name, value in runs[0].settings.items() if name not in ("method", "seed")}
    return {name: value for name, value in first.items() if all(run.settings.get(name) == value for run in runs)}


def _together(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    values = {name: list(dict.fromkeys(str(record[name]) for record in records if name in record)) for name in names}
    return {name: ", ".join(of) for name, of in values.items() if of}


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(title: str, values: Mapping[str, str], open_: bool = False) -> Html:
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", escape(text))) for name, text in values.items()]
    return tag("details", tag("summary", title), tag("table", tag("tbody", *rows), cls="plain"), open=open_)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
