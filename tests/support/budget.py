"""The size of the project beside `budget.toml`: `python -m tests.support.budget` fails where a bound is passed."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

from tests.support.repository import ROOT, sources


def measure() -> dict[str, int]:
    """The sizes, by the names that `budget.toml` has."""
    product = {path: _count_lines(path) for path in sources()}
    tests = [_count_lines(path) for path in sources("tests")]
    nightly = (ROOT / "tests" / "nightly.txt").read_text(encoding="utf-8").splitlines()
    return {
        "product_lines": sum(product.values()),
        "product_files": len(product),
        "product_files_under_80_lines": sum(lines < 80 for lines in product.values()),
        "folders_over_15_files": sum(files > 15 for files in Counter(path.parent for path in product).values()),
        "test_lines": sum(tests),
        "test_files_over_600_lines": sum(lines > 600 for lines in tests),
        "nightly_patterns": sum("::" in line and not line.startswith("#") for line in nightly),
        "readme_words": _count_words(ROOT / "README.md"),
        "architecture_words": _count_words(ROOT / "ARCHITECTURE.md"),
        "docs_words": sum(_count_words(page) for page in (ROOT / "docs").rglob("*.md")),
    }


def _count_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _count_words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def main() -> int:
    budget = tomllib.loads((ROOT / "budget.toml").read_text(encoding="utf-8"))
    sizes = measure()
    for name, size in sizes.items():
        print(f"{name:30} {size:7,} of {budget[name]:7,}{'  OVER' if size > budget[name] else ''}")
    return int(any(size > budget[name] for name, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
