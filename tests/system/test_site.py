"""The documentation site: it is built strictly, loads nothing from a network, and fits a phone; its notebook runs."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedstill as fs
from fedstill import api
from fedstill.methods import METHODS

from ..chromium import opened

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "docs" / "_site"
NOTEBOOK = ROOT / "docs" / "notebooks" / "first-federation.ipynb"
LOADED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")


def part(name: str) -> ModuleType:
    """Import a module of docs/_site."""
    spec = importlib.util.spec_from_file_location(name, PARTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 60
    loaded = {match for page in pages for match in LOADED.findall(page.read_text(encoding="utf-8"))}
    assert not loaded
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.search(r"url\([\"']?(?:https?:)?//", styles)


def test_every_public_name_is_explained(site: Path) -> None:
    """Names of `fs` are on the page of the library, but for methods, which have pages of their own, and aliases."""
    text = (site / "api.html").read_text(encoding="utf-8")
    methods = {cls.__name__: cls.id for cls in METHODS.values()}
    for name in set(api.__all__) - {"Params", "Tree", "METHODS", "terms", "tree"}:
        found = getattr(fs, name)
        if name in methods:
            assert (site / "methods" / f"{methods[name]}.html").is_file()
        else:
            assert f'id="{found.__module__}.{found.__qualname__}"' in text, name


def test_settings_are_all_there(site: Path) -> None:
    text = (site / "settings.html").read_text(encoding="utf-8")
    assert all(
        f"<code>{name}</code>" in text for name in ("rounds", "patience", "score_round", "data", "privacy_budget")
    )


@pytest.mark.parametrize("width", [390, 1440])
def test_pages_fit_phones_and_desks(address: str, width: int) -> None:
    with opened() as page:
        for name in ("index", "quick-start", "api", "settings", "data", "notebooks/first-federation", "methods/index"):
            page.open(f"{address}/{name}.html", width)
            assert page.overflow() <= 0, name
            assert not page.messages, (name, page.messages)
        page.open(f"{address}/index.html", width)
        page.script("document.querySelector('[data-md-component=search-query]').focus();")
        page.script("""const input = document.querySelector('[data-md-component=search-query]');
          input.value = 'early stopping'; input.dispatchEvent(new Event('input', {bubbles: true}));""")
        found = page.wait(
            "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ');"
        )
        assert "evaluation.html" in found


def test_the_notebook_is_as_it_runs() -> None:
    """It is kept executed; run again, every cell gives outputs of the same kinds, progress and tables among them."""
    pytest.importorskip("nbclient")
    kept = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    cells = part("notebooks").executed(NOTEBOOK).cells
    code = [(old, new) for old, new in zip(kept, cells, strict=True) if old["cell_type"] == "code"]
    assert len(code) > 5

    def kinds(outputs: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
        return [(output["output_type"], tuple(sorted(output.get("data", {})))) for output in outputs]

    for old, new in code:
        assert old["execution_count"] == new["execution_count"], "run `make notebooks`"
        assert kinds(old["outputs"]) == kinds(new["outputs"]), "".join(old["source"])
    texts = "".join(str(output) for _, new in code for output in new["outputs"])
    assert texts.count("<progress value=") == 4
    assert "<table>" in texts
    assert "stopped after round" in texts


def test_a_page_is_made_of_a_notebook() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A title"]},
        {
            "cell_type": "code",
            "source": ["1 < 2"],
            "outputs": [
                {"output_type": "stream", "text": ["a <b>\n"]},
                {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": "Figure"}},
                {"output_type": "execute_result", "data": {"text/html": ["<i>x</i>"], "text/plain": "x"}},
                {"output_type": "execute_result", "data": {"text/plain": ["1 < 2"]}},
            ],
        },
    ]
    text = part("hooks").page_of({"cells": cells})
    for piece in (
        "# A title", "```python\n1 < 2\n```", "a &lt;b&gt;", "base64,QUJD\"", "<i>x</i>", "<pre class='output'>1 &lt; 2</pre>",
    ):  # fmt: skip
        assert piece in text
