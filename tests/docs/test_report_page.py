"""The page that compares Shoal with other systems shows the results of record."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STAMP = {"day": "2026-11-28", "machine": "x86_64, 2 cores"}
OF_TRACE = {
    **STAMP,
    "command": "bench/trace.py --mtbf 10 --record",
    "trace": "poisson",
    "mtbf_min": 10.0,
    "speed": 60.0,
    "steps_per_s": 25.0,
    "step_s": 0.036,
    "changes": 40,
    "paused_per_change_s": 0.125,
    "longest_pause_s": 0.9,
    "steps_twice": 3,
    "steps_lost": 0,
    "distance": 1.5e-06,
}


@pytest.fixture
def peer_report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import peer_report  # noqa: PLC0415 - bench/ is on the path of a test only

    yield peer_report
    sys.modules.pop("peer_report")


@pytest.fixture
def results(peer_report: Any) -> dict[str, Any]:
    paths = [
        (name, DOCS / "benchmarks" / "results" / f"{name}.json") for name in peer_report.BLOCKS
    ]
    return {name: json.loads(path.read_text()) for name, path in paths if path.exists()}


def empty_page(peer_report: Any) -> str:
    names = [*peer_report.BLOCKS, peer_report.AHEAD]
    return "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names)


def test_the_page_shows_the_results(peer_report: Any, results: dict[str, Any]) -> None:
    page = (DOCS / "report.md").read_text()
    assert peer_report.page_with(page, results) == page


def test_the_figures_show_the_results(peer_report: Any, results: dict[str, Any]) -> None:
    for name, figure in peer_report.figures(results).items():
        assert (DOCS / "benchmarks" / f"{name}.svg").read_text() == figure


def test_seeds_of_one_system_make_one_row(peer_report: Any) -> None:
    entries = [
        {**OF_TRACE, "system": system, "seed": seed, "effective": share + seed / 100}
        for system, share in (("shoal-ddp", 0.9), ("torchrun", 0.3))
        for seed in (1, 2, 3)
    ]
    lines = peer_report.trace_table(entries).splitlines()
    (own,) = (line for line in lines if "| shoal-ddp |" in line)
    assert "| a loss every 10 min, 60 x | shoal-ddp | 3 | 92.0 % (91.0 to 93.0) |" in own
    assert own.endswith("| 0.125 | 0.9 | 3 | 0 | 1.5e-06 |")
    figure = peer_report.figures({"trace": entries})["trace"]
    assert "shoal-ddp: 92 %" in figure
    assert "torchrun: 32 %" in figure


def test_a_run_in_which_nothing_trained_at_the_end_is_counted(peer_report: Any) -> None:
    entry = {**OF_TRACE, "system": "torchrun", "effective": 0.1}
    stopped = {**entry, "seed": 2, "distance": None}
    lines = peer_report.trace_table([{**entry, "seed": 1}, stopped]).splitlines()
    assert lines[-1].endswith("| 1.5e-06 (1 had stopped) |")
    (alone,) = peer_report.trace_table([stopped]).splitlines()[-1:]
    assert alone.endswith("| (1 had stopped) |")


def test_a_distance_that_is_no_number_is_shown(peer_report: Any) -> None:
    entries = [
        {**OF_TRACE, "system": "torchrun", "effective": 0.1, "seed": seed, "distance": distance}
        for seed, distance in ((1, 1e-6), (2, float("nan")))
    ]
    assert peer_report.trace_table(entries).splitlines()[-1].endswith("| nan |")


def test_a_run_without_changes_has_no_pause_per_change(peer_report: Any) -> None:
    entry = {**OF_TRACE, "system": "one-process", "effective": 0.9, "seed": 1}
    (alone,) = peer_report.trace_table([{**entry, "changes": 0}]).splitlines()[-1:]
    assert alone.endswith("| 36 | 0 |  | 0.9 | 3 | 0 | 1.5e-06 |")


def test_runs_with_other_options_have_rows_of_their_own(peer_report: Any) -> None:
    """Notice and the most machines are part of the row's name; entries of one row share them."""
    entry = {**OF_TRACE, "system": "shoal-ddp", "seed": 1, "effective": 0.9}
    others = [{**entry, "notice_s": 5.0}, {**entry, "max_machines": 2}]
    lines = peer_report.trace_table([entry, *others]).splitlines()[-3:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| a loss every 10 min, 60 x",
        "| a loss every 10 min, 60 x, notice 5 s",
        "| a loss every 10 min, 60 x, 1 to 2 machines",
    ]


def test_a_run_that_failed_is_named_below_the_table(peer_report: Any) -> None:
    page = empty_page(peer_report)
    entry = {**OF_TRACE, "system": "torchrun", "seed": 1, "effective": 0.5}
    failed = {**STAMP, "command": "bench/trace.py", "system": "shoal-ddp", "seed": 2}
    failed |= {"trace": "poisson", "failed": "no 4 machines train"}
    shown = peer_report.page_with(page, {"trace": [entry, failed]})
    assert "Did not get to the end: `shoal-ddp` with seed 2 (no 4 machines train)." in shown
    assert "| shoal-ddp |" not in shown
    assert peer_report.page_with(page, {"trace": [entry]}).count("Did not") == 0


def test_systems_without_results_are_absent(peer_report: Any) -> None:
    empty = empty_page(peer_report)
    assert peer_report.page_with(empty, {}) == empty
    entries = [{**OF_TRACE, "system": "torchft", "seed": 1, "effective": 0.5}]
    page = peer_report.page_with(empty, {"trace": entries})
    assert ".venv/bin/python bench/trace.py --mtbf 10 --record" in page
    assert page.count("|---") and "shoal-ddp" not in page
    assert peer_report.page_with(page, {}) == empty


def test_each_figure_in_which_a_peer_is_better_is_listed(peer_report: Any) -> None:
    """Equal figures are not listed, nor is one process, to which no change is made."""
    own = {**OF_TRACE, "system": "shoal-ddp", "seed": 1, "effective": 0.95}
    better = {**own, "system": "torchft", "effective": 0.97, "longest_pause_s": 0.4}
    alone = {**own, "system": "one-process", "effective": 0.99}
    quicker = {**own, "system": "torchrun", "step_s": 0.01, "paused_per_change_s": 0.1}
    (text_of_quicker,) = peer_report.ahead({"trace": [own, quicker]})
    assert "(torchrun 0.01 s)" in text_of_quicker
    assert "paused per change 0.125 s (torchrun 0.1 s)" in text_of_quicker
    unchanged = [{**each, "paused_per_change_s": None} for each in (own, quicker)]
    assert "paused per change" not in peer_report.ahead({"trace": unchanged})[0]
    (text,) = peer_report.ahead({"trace": [own, better, alone]})
    assert text == (
        "- a loss every 10 min, 60 x, `shoal-ddp`: effective time 95.0 % (torchft 97.0 %);"
        " longest pause 0.9 s (torchft 0.4 s)."
    )
    assert (
        peer_report.ahead({"trace": [own, {**alone, "system": "torchrun", "effective": 0.9}]}) == []
    )
    rows = [
        {"metric": "worker_rows", "value": 1.5, "peer": peer, "peer_value": value}
        for peer, value in (("torch-rpc", 2.5), ("ray-actor", 0.5))
    ]
    (text,) = peer_report.ahead({"rows": rows})
    assert text == "- `worker_rows`, million rows a second: 1.5 (torch-rpc 2.5)."


def test_a_page_without_one_of_the_blocks_is_refused(peer_report: Any) -> None:
    with pytest.raises(ValueError, match="0 blocks trace"):
        peer_report.page_with("# A page\n", {})


def test_each_process_of_a_run_with_kills_has_a_row(peer_report: Any) -> None:
    usage = {"memory_kib": 1000, "threads": 8, "files": 30}
    entry = {
        **STAMP,
        "command": "bench/long_run.py kills --record",
        "system": "shoal-ddp",
        "kills": 2000,
        "kills_per_minute": 12.0,
        "steps": 90_000,
        "distance": 1e-6,
        "shm_files": [4, 4],
        "shm_bytes": [1000, 1000],
        "samples": [{"coordinator": usage}, {"coordinator": {**usage, "memory_kib": 1200}}],
        "growth_per_kill": {"coordinator": {"memory_kib": 0.1, "threads": 0.0, "files": 0.0}},
    }
    shown = peer_report.kills_table([entry])
    assert "| shoal-ddp | coordinator | 1,000 to 1,200 | 8 to 8 | 30 to 30 | 0.1 |" in shown
