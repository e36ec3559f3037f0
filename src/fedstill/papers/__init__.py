"""The experiments of the five papers: one TOML file per paper, with the names and values of this library.

    title, venue, note             the paper
    [common]                       values that all its settings share; `load` merges them into each
    [settings.NAME]                fields of `Experiment`; `unstated` lists those that the paper does not state, with our values
    [method]                       the paper's own method: `id`, and the fields that the paper states
    [baselines.ID]                 a method it compares with, in the same form; fields that the paper does not state are left out
    [reported]                     what all its tables and figures share: `seeds`, `spread`, `unstated`, `contract`
    [exhibits.ID]                  a table or figure, as table2 or fig5: see below

A method's table may also have `tried` (values that the paper chose among), `unstated` (fields whose values are ours),
`experiment` (fields of `Experiment` for this method only, such as `head`) and `on.PATTERN` (values for the settings with matching
names; `*` matches anything). `note` says where in the paper a value is stated and what is missing there.

An exhibit has `columns` and `rows` in the paper's order, and a row has `values`, one a column. Exhibit, panel, row and column may
each state a `setting`, a `method`, a `variant` (fields of `Experiment`; those of the method in its table `method`) and entries of
the `contract` (`Contract`: which number it is). A cell is what they say together, the later over the earlier; where no method is
stated it is the paper's own. A row's `on.PATTERN` has entries for the columns with matching ids. A value is a number, [mean, ± as
printed], a text such as "> 98" where the paper says no more, "?" where it prints no number (also for all of a row without
`values`), or "-" where there is no cell. `panels` are the blocks of a table or the plots of a figure, each with `columns` and
`rows` of its own where they differ. An exhibit `like` another has all that the other says, under its own words, and `only` the
cells whose `setting` or `method` matches a pattern: another reading of what the paper says. `unstated` names what the paper does
not say and we chose: seeds, or an entry of the contract.
"""

from __future__ import annotations

from .cells import METRICS, Cell, Contract, Exhibit, Metric, Panel
from .files import ABOUT, BESIDE, load, names, values, vary
from .parse import exhibit, exhibits

__all__ = [
    "ABOUT", "BESIDE", "METRICS", "Cell", "Contract", "Exhibit", "Metric", "Panel", "exhibit", "exhibits", "load", "names",
    "values", "vary",
]  # fmt: skip
