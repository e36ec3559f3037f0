"""Run the notebooks of docs/ again and keep what they gave: `make notebooks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def executed(file: Path, seconds: int = 300) -> Any:
    """Return a notebook, run from top to bottom in a new kernel; what fails in a cell is raised."""
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": str(file.parent)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(executed(file), file)
        print(file.name)
