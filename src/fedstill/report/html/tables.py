"""Tables in HTML, LaTeX (booktabs), Markdown and CSV, all from the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .markup import Html, csv, data_uri, download, tag

LATEX = {
    **{"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"},
    **{
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": "$-$",
        "–": "--",
        "ε": r"$\varepsilon$",
    },
    **{"†": r"$^\dagger$", "<": "$<$", ">": "$>$", "λ": r"$\lambda$", "τ": r"$\tau$", "…": r"\dots{}", "·": r"$\cdot$"},
}


@dataclass(frozen=True)
class Column:
    """A heading and a text for each row."""

    heading: str
    cells: Sequence[str]
    left: bool = False  # aligned to the left: words, not numbers


@dataclass(frozen=True)
class Table:
    """Columns of equal length; the first two cells of the rows in `strong` stand out."""

    name: str
    title: str
    columns: Sequence[Column]
    strong: frozenset[int] = frozenset()
    notes: Sequence[object] = field(default_factory=tuple)

    def rows(self) -> list[list[str]]:
        """Return the cells by row."""
        return [[column.cells[i] for column in self.columns] for i in range(len(self.columns[0].cells))]

    def csv(self) -> str:
        """Return the table as CSV."""
        return csv([column.heading for column in self.columns], self.rows())

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [[column.heading for column in self.columns], [":--" if c.left else "--:" for c in self.columns]]
        lines += [
            [f"**{cell}**" if i in self.strong and n < 2 else cell for n, cell in enumerate(row)]
            for i, row in enumerate(self.rows())
        ]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def latex(self) -> str:
        """Return the table in LaTeX, for the package booktabs."""
        head = " & ".join(latex(column.heading) for column in self.columns)
        rows = []
        for i, row in enumerate(self.rows()):
            cells = [
                rf"\textbf{{{latex(cell)}}}" if i in self.strong and n < 2 else latex(cell)
                for n, cell in enumerate(row)
            ]
            rows.append(" & ".join(cells) + r" \\")
        kinds = "".join("l" if column.left else "r" for column in self.columns)
        body = "\n".join(rows)
        top = f"% \\usepackage{{booktabs}}\n\\begin{{tabular}}{{{kinds}}}\n\\toprule\n{head} \\\\\n\\midrule"
        return f"{top}\n{body}\n\\bottomrule\n\\end{{tabular}}\n"

    def html(self) -> Html:
        """Return the table with its title, links and notes."""
        head = tag("tr", *(tag("th", c.heading, cls="left" if c.left else None, scope="col") for c in self.columns))
        body = []
        for i, row in enumerate(self.rows()):
            cells = [
                tag("th" if n == 0 else "td", cell, cls="left" if c.left else None, scope="row" if n == 0 else None)
                for n, (c, cell) in enumerate(zip(self.columns, row, strict=True))
            ]
            body.append(tag("tr", *cells, cls="best" if i in self.strong else None))
        links = [download("CSV", self.csv(), f"{self.name}.csv")]
        for words, text, end in (("LaTeX", self.latex(), "tex"), ("Markdown", self.markdown(), "md")):
            href = data_uri(text, "text/plain")
            links.append(tag("a", words, href=href, download=f"{self.name}.{end}", cls="get", data_copy=True))
        top = tag("div", tag("h3", self.title), tag("div", *links, cls="gets"), cls="head")
        grid = tag("div", tag("table", tag("thead", head), tag("tbody", *body)), cls="scroll", tabindex=0)
        notes = tag("ul", *(tag("li", note) for note in self.notes), cls="notes") if self.notes else ""
        return tag("section", top, grid, notes, cls="table", id=self.name)


def latex(text: str) -> str:
    """Return a text as LaTeX writes it.

    >>> latex("50 % ± 1_2")
    '50 \\\\% $\\\\pm$ 1\\\\_2'
    """
    return "".join(LATEX.get(letter, letter) for letter in text)
