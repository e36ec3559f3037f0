"""What the site adds to docs/: executed notebooks, the table of settings, and files of the repository that pages link to."""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?P<open>\]\()(?P<target>(?!https?:|mailto:|#)[^)#\s]+)(?P<anchor>#[^)]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".sh": "bash"}


# ---- where a link leads -------------------------------------------------------------------------------------------------
def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of docs/."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        text = page_of(json.loads(Path(notebook.abs_src_path or "").read_text(encoding="utf-8")))
        files.append(File.generated(config, f"{notebook.src_uri.removesuffix('.ipynb')}.md", content=text))
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    for target in sorted(linked()):
        files.append(File.generated(config, source_uri(target), content=source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links that leave docs/ to the pages that stand for what they name."""
    uri = page.file.src_uri
    here = posixpath.dirname(uri if uri in ROOT_PAGES else f"docs/{uri}")

    def pointed(match: re.Match[str]) -> str:
        target = site_uri(posixpath.normpath(posixpath.join(here, match["target"])))
        link = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"{match['open']}{link}{match['anchor'] or ''})"

    return LINK.sub(pointed, markdown)


def site_uri(target: str) -> str:
    """Return the page or file of the site for a path in the repository."""
    if target == "README.md":
        return "index.md"
    if target.endswith(".ipynb"):
        target = f"{target.removesuffix('.ipynb')}.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return target if target in ROOT_PAGES else source_uri(target)


def source_uri(target: str) -> str:
    """Return the page that shows a file or a folder of the repository."""
    return f"source/{target}/README.md" if (ROOT / target).is_dir() else f"source/{target}.md"


def linked() -> set[str]:
    """Return the files and folders of the repository to which pages link and which are no pages."""
    found = set()
    for page in [*(ROOT / name for name in ROOT_PAGES), *(ROOT / "docs").rglob("*.md")]:
        here = page.parent.relative_to(ROOT).as_posix()
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(here, match["target"]))
            if not target.startswith("docs/") and not target.endswith(".md"):
                found.add(target)
    return found


def source_page(target: str) -> str:
    """Return a page with a file's text, or with the names of a folder's files."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        return "\n".join([f"# {target}", "", *(f"- {name}" for name in names)])
    text = path.read_text(encoding="utf-8").rstrip()
    return f"# {path.name}\n\n`{target}`\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~\n"


# ---- settings -----------------------------------------------------------------------------------------------------------
def settings_page() -> str:
    """Return a table of every setting of an experiment, from the dataclass that defines them."""
    from fedstill import Experiment
    from fedstill.core import settings

    lines = [
        "# Settings",
        "",
        "Every field of `Experiment`: a keyword of `fs.Experiment` and, but for data and model, of `fs.simulate`; a key of "
        "`experiment.toml`; and a flag, with `-` for `_`. A method's own fields are on [its page](methods/README.md).",
    ]
    hints, groups = settings.types_of(Experiment), {}
    for field in settings.fields_of(Experiment):
        groups.setdefault(field.metadata["group"], []).append(field)
    for group, fields in groups.items():
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", "| field | default | takes | |", "|---|---|---|---|"]
        for field in fields:
            takes = f"{settings.kind(hints[field.name])} {settings.limits(field.metadata)}".strip()
            cells = [f"`{field.name}`", shown(field.default), takes, " ".join(field.metadata["help"].split())]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def shown(default: object) -> str:
    """Return a default as it stands in TOML."""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default) if default not in ("", ()) else "–"


# ---- notebooks ----------------------------------------------------------------------------------------------------------
def page_of(notebook: dict[str, Any]) -> str:
    """Return a notebook's cells and what they gave, as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
            parts += [given for output in cell["outputs"] if (given := output_of(output))]
    return "\n\n".join(parts) + "\n"


def output_of(output: dict[str, Any]) -> str:
    """Return one output of a cell: what it printed, a picture, HTML, or a text."""
    if output["output_type"] == "stream":
        return f"<pre class='output'>{html.escape(''.join(output['text']).rstrip())}</pre>"
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img class="output" alt="figure" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f"<pre class='output'>{html.escape(''.join(data.get('text/plain', '')))}</pre>"
