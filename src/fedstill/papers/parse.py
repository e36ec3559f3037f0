"""From a paper's TOML to its exhibits: every cell is what its exhibit, panel, row and column say together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_args

from ..core.errors import InputError
from .cells import Cell, Contract, Exhibit, Panel, Relation
from .files import check_name, load, names, vary

ABSENT, UNPRINTED = "-", "?"  # no such cell; a cell whose number is not printed
LINE = {"label", "id", "setting", "method", "variant", "contract", "x"}  # what a row or column may say
BLOCK = {"setting", "method", "variant", "contract", "axes", "rows", "columns"}
KEYS = {
    "exhibit": BLOCK | {"title", "where", "form", "seeds", "spread", "note", "unstated", "panels", "like", "only"},
    "panel": BLOCK | {"id", "title"},
    "row": LINE | {"values", "on"},
    "column": LINE,
}


def exhibits(name: str) -> dict[str, Exhibit]:
    """Return a paper's tables and figures by id, in the paper's order."""
    check_name("paper", name, names())
    return dict(_exhibits(name))


def exhibit(name: str) -> Exhibit:
    """Return the exhibit with this full name, as pfedsd/table2."""
    paper, slash, id = name.partition("/")
    if not slash:
        check_name("paper", paper, names())
        right = f"with a table or figure, as {paper}/{next(iter(exhibits(paper)))}"
        raise InputError("exhibit", name, right)
    known = exhibits(paper)
    check_name("exhibit", id, known)
    return known[id]


@cache
def _exhibits(name: str) -> tuple[tuple[str, Exhibit], ...]:
    paper = load(name)
    return tuple(parsed(name, paper["exhibits"], paper["reported"]).items())


def parsed(paper: str, tables: Mapping[str, dict[str, Any]], shared: Mapping[str, Any]) -> dict[str, Exhibit]:
    """Return the exhibits that a paper's file describes in `exhibits` and `reported`."""
    return {id: _exhibit(paper, id, _resolved(table, tables), shared) for id, table in tables.items()}


def _resolved(table: dict[str, Any], tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an exhibit's table; one that is `like` another has what that one says, under what it says itself."""
    if "like" not in table:
        return table
    check_name("like", table["like"], tables)
    base = tables[table["like"]]
    merged = {**base, **table}
    if "variant" in base and "variant" in table:
        merged["variant"] = vary(base["variant"], table["variant"])
    if "contract" in base and "contract" in table:
        merged["contract"] = {**base["contract"], **table["contract"]}
    return merged


def _exhibit(paper: str, id: str, table: Mapping[str, Any], shared: Mapping[str, Any]) -> Exhibit:
    """Return one exhibit; `shared` is what all of the paper's say."""
    where = f"{paper}/{id}"
    _check_keys(where, "exhibit", table)
    only = table.get("only", {})
    panels, cells = [], []
    for panel in table.get("panels", [{}]):
        _check_keys(where, "panel", panel)
        both = {**table, **panel}
        here = []
        columns = both.get("columns", [{"label": ""}])
        for row in both.get("rows", [{"label": ""}]):
            _check_keys(where, "row", row)
            for column, value in _aligned(where, row, columns):
                here.append(_cell(paper, id, shared, table, panel, row, column, value))
        here = [cell for cell in here if all(fnmatchcase(getattr(cell, key), value) for key, value in only.items())]
        axes = {**table.get("axes", {}), **panel.get("axes", {})}
        rows = tuple(dict.fromkeys(cell.row for cell in here))
        shown = {cell.column for cell in here}
        labels = tuple(column["label"] for column in columns if column["label"] in shown)
        panels.append(Panel(id=panel.get("id", ""), title=panel.get("title", ""), rows=rows, columns=labels, **axes))
        cells += here
    return Exhibit(
        paper=paper,
        id=id,
        kind="figure" if id.startswith("fig") else "table",
        title=table["title"],
        where=table["where"],
        form=table.get("form", "table"),
        seeds=table.get("seeds", shared["seeds"]),
        spread=table.get("spread", shared["spread"]),
        note=table.get("note", ""),
        like=table.get("like", ""),
        unstated=(*shared["unstated"], *table.get("unstated", ())),
        panels=tuple(panels),
        cells=tuple(cells),
    )


def _aligned(where: str, row: Mapping[str, Any], columns: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the columns that a row has cells in, each with what is printed there."""
    printed = row.get("values", [UNPRINTED] * len(columns))
    if len(printed) != len(columns):
        raise InputError("values", f"{where}, {row['label']}", f"{len(columns)} values, one a column")
    for column, value in zip(columns, printed, strict=True):
        _check_keys(where, "column", column)
        if value != ABSENT:
            yield column, value


def _cell(
    paper: str,
    exhibit: str,
    shared: Mapping[str, Any],
    table: Mapping[str, Any],
    panel: Mapping[str, Any],
    row: Mapping[str, Any],
    column: Mapping[str, Any],
    value: Any,
) -> Cell:
    """Return the cell in a row and a column: what is said later goes over what is said before."""
    own = [more for pattern, more in row.get("on", {}).items() if fnmatchcase(_id_of(column), pattern)]
    levels = [shared, table, panel, row, column, *own]
    variant: dict[str, Any] = {}
    contract: dict[str, Any] = {}
    for entry in levels:
        variant = vary(variant, entry.get("variant", {}))
        contract.update(entry.get("contract", {}))
    setting = next((entry["setting"] for entry in reversed(levels) if "setting" in entry), "")
    method = next((entry["method"] for entry in reversed(levels) if "method" in entry), paper)
    lines = [column, row] if "setting" in column and "setting" not in row else [row, column]
    published, spread, relation = _number(value)
    return Cell(
        paper=paper,
        exhibit=exhibit,
        id="/".join(filter(None, [panel.get("id", ""), *map(_id_of, lines)])) or exhibit,
        setting=setting,
        method=method,
        label=(column if "method" in column else row)["label"],
        variant=variant,
        contract=Contract(**contract),
        published=published,
        spread=spread,
        relation=relation,
        row=row["label"],
        column=column["label"],
        panel=panel.get("id", ""),
        x=column.get("x", row.get("x")),
    )


def _id_of(line: Mapping[str, Any]) -> str:
    """Return a row's or column's part of a cell's id: as stated, else its setting, its method, or its label in lower case."""
    for key in ("id", "setting", "method"):
        if key in line:
            return str(line[key])
    return re.sub(r"[^a-z0-9.]+", "-", line["label"].lower()).strip("-")


def _number(value: Any) -> tuple[float | None, float | None, Relation]:
    """Return what is printed: a number, a number with ± and, as in "> 98", a number with its relation."""
    if value == UNPRINTED:
        return None, None, "="
    if isinstance(value, str):
        relation, number = value.split()
        if relation not in get_args(Relation):
            raise InputError("values", value, f"a number with one of {get_args(Relation)} before it")
        return float(number), None, relation  # type: ignore[return-value]
    if isinstance(value, list):
        number, spread = value
        return float(number), float(spread), "="
    return float(value), None, "="


def _check_keys(where: str, kind: str, table: Mapping[str, Any]) -> None:
    """Refuse a key that has no meaning."""
    for key in table:
        check_name(f"{where}: {kind}", key, KEYS[kind])
