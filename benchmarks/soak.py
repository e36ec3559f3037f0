"""The damage done in full: kills, torn files, forged uploads, hostile files, attackers; minutes to hours.

    python benchmarks/soak.py [--only NAME …] [--short] [--list]        (or `make soak`)

Every module `soak_*.py` of this folder holds `SECTIONS`: a name → a function that takes `short` (the form that the
test suite runs) and returns rows `(fault, outcome, figure)`; it raises AssertionError where a promise is broken.
Prints a row as soon as its section has ended; ends with status 1 where a section failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

Row = tuple[str, str, str]
Section = Callable[[bool], list[Row]]
FOLDER = Path(__file__).resolve().parent


def sections() -> dict[str, Section]:
    """Return every section of the folder by name, in the order of its modules."""
    sys.path.insert(0, str(FOLDER))
    modules = [importlib.import_module(file.stem) for file in sorted(FOLDER.glob("soak_*.py"))]
    return {name: section for module in modules for name, section in module.SECTIONS.items()}


def main() -> int:
    known = sections()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(known), metavar="NAME", help="run only these sections")
    parser.add_argument("--short", action="store_true", help="the form that the test suite runs")
    parser.add_argument("--list", action="store_true", help="print the names of the sections and stop")
    args = parser.parse_args()
    if args.list:
        print("\n".join(known))
        return 0
    failed = []
    for name in args.only or known:
        began = time.monotonic()
        try:
            rows = known[name](args.short)
        except Exception:
            failed.append(name)
            traceback.print_exc()
            rows = []
        print(f"## {name} ({time.monotonic() - began:.0f} s{', FAILED' if name in failed else ''})", flush=True)
        for row in rows:
            print("| " + " | ".join(row) + " |", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
