"""Source lines per package (`make size`). The budget is what one person reads in two days."""

from __future__ import annotations

import sys
from pathlib import Path

BUDGET = 18_000


def main(packages: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    counts = {p: sum(len(f.read_text().splitlines()) for f in (root / p).rglob("*.py")) for p in packages}
    for package, lines in counts.items():
        print(f"{package:12} {lines:6}")
    total = sum(counts.values())
    print(f"{'total':12} {total:6} of {BUDGET}")
    return 0 if total <= BUDGET else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
