"""Write docs/results/ and the README's table from kept results; with --keep FOLDER first keep what was reproduced there.

python benchmarks/results.py --keep reproduced
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedstill.reproduce import collect

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="the --out of 'fedstill reproduce'")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "results", metavar="FOLDER")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    asked = parser.parse_args()
    if asked.keep is not None:
        for path in collect.keep(asked.keep, asked.to):
            print(f"kept: {path}")
    for path in collect.write(asked.to, asked.readme):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
