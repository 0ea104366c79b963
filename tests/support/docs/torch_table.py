"""The table of strategies by release of torch in docs/strategies.md: how many tests passed.

make torch-table TORCH=2.11.0     runs the tests that the table counts, with that release
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

from shoal.strategies import STRATEGIES

DOCS = Path(__file__).parents[3] / "docs"
RESULTS, PAGE = DOCS / "torch-releases.json", DOCS / "strategies.md"
BEGIN, END = "<!-- torch-table: written by `make torch-table` -->", "<!-- /torch-table -->"
_NAMES = "|".join(sorted(map(re.escape, STRATEGIES), key=len, reverse=True))
Counts = Mapping[str, Sequence[int]]
"""Numbers of passed and failed tests by strategy."""
OTHER_NAMES = {"zero3": "fsdp"}
"""Second names of strategies, and the name under which their tests are counted."""


def strategy_of(test: ElementTree.Element) -> str | None:
    """The strategy that a test's parameters name."""
    named = re.search(rf"\[(?:.*?[\[-])??({_NAMES})(?![a-z0-9])", test.get("name", ""))
    return OTHER_NAMES.get(named[1], named[1]) if named else None


def counts_of(*reports: Path) -> Counts:
    """Counts in reports of pytest (`--junitxml`), without skipped tests."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for test in (test for each in reports for test in ElementTree.parse(each).iter("testcase")):
        strategy = strategy_of(test)
        if strategy is not None and test.find("skipped") is None:
            failed = test.find("failure") is not None or test.find("error") is not None
            counts[strategy][failed] += 1
    return dict(sorted(counts.items()))


def table(results: Mapping[str, Counts]) -> str:
    releases = sorted(results, key=lambda each: tuple(map(int, each.split("."))))
    lines = ["| strategy | " + " | ".join(f"torch {each}" for each in releases) + " |"]
    lines.append("|---|" + "---|" * len(releases))
    for strategy in (each for each in STRATEGIES if each not in OTHER_NAMES):
        cells = [_cell(results[release].get(strategy)) for release in releases]
        names = [strategy, *(other for other, name in OTHER_NAMES.items() if name == strategy)]
        lines.append(f"| {', '.join(f'`{each}`' for each in names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(counts: Sequence[int] | None) -> str:
    if counts is None:
        return "not run"
    passed, failed = counts
    return f"{passed} passed, {failed} failed" if failed else f"{passed} passed"


def page_with(text: str, results: Mapping[str, Counts]) -> str:
    """The page with the table of these results."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}"


def main(*reports: str) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[torch.__version__.split("+")[0]] = counts_of(*map(Path, reports))
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page_with(PAGE.read_text(), results))


if __name__ == "__main__":
    main(*sys.argv[1:])
