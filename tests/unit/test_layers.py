"""Imports go downwards: a package imports those before it in this list and nothing else, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstill

SOURCE = Path(fedstill.__file__).parent
LAYERS = (
    ("core",),
    ("nn",),
    ("data", "models", "methods"),  # beside one another: none imports another
    ("engine",),
    ("transport",),
    ("edge",),
    ("server",),
    ("timing",),
    ("scores",),
    ("run", "papers"),
    ("report",),
    ("testing",),
    ("reproduce",),
    ("deploy",),
    ("cli",),
)
LAYER = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FREE = {"__init__", "__main__", "api"}  # the front door imports everything


def modules() -> list[Path]:
    return sorted(
        file for file in SOURCE.rglob("*.py") if file.relative_to(SOURCE).parts[0].removesuffix(".py") not in FREE
    )


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("fedstill", *parts)).removesuffix(".__init__")


NAMES = {name_of(file) for file in SOURCE.rglob("*.py")}


def imported(file: Path) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in it."""
    name, package = name_of(file), name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            if base == "fedstill" or base.startswith("fedstill."):
                for alias in node.names:
                    found = f"{base}.{alias.name}"
                    yield found if found in NAMES else base
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fedstill"))
    assert name in NAMES


def package_of(module: str) -> str:
    return ([*module.split("."), ""])[1]


def test_every_package_has_its_layer() -> None:
    assert {package_of(name_of(file)) for file in modules()} == set(LAYER)


@pytest.mark.parametrize("package", LAYER)
def test_imports_go_downwards(package: str) -> None:
    upward = []
    for file in modules():
        if package_of(name_of(file)) != package:
            continue
        for module in imported(file):
            other = package_of(module)
            if other != package and (other not in LAYER or LAYER[other] >= LAYER[package]):
                upward.append(f"{name_of(file)} imports {module}")
    assert not upward, "\n".join(upward)


def test_modules_of_a_package_do_not_import_one_another_in_a_circle() -> None:
    edges = {name_of(file): {m for m in imported(file) if m != name_of(file)} for file in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name in done or name not in edges:
            return
        for other in sorted(edges[name]):
            visit(other, (*path, name))
        done.add(name)

    for name in edges:
        visit(name, ())
