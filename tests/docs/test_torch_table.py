"""The table of strategies by release of torch shows the results of record."""

import json
from pathlib import Path

import pytest
from support.docs.torch_table import PAGE, RESULTS, counts_of, page_with, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[fsdp-tensor-4-sgd]"/>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[ddp-2-sgd]">
<failure/></testcase>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[zero1-2]">
<skipped/></testcase>
<testcase classname="tests.worker.strategies.test_late_collectives" name="test_late[pipeline-]"/>
<testcase classname="tests.worker.test_torch_private" name="test_floor"/>
</testsuite></testsuites>"""
OF_SERVERS = """<testsuites><testsuite>
<testcase classname="tests.worker.test_async_session" name="test_once[async-diloco]"/>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[zero3-2]"/>
</testsuite></testsuites>"""


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text()
    assert page_with(page, json.loads(RESULTS.read_text())) == page


@pytest.mark.parametrize("strategy", sorted(json.loads(RESULTS.read_text())["2.13.0"]))
def test_no_release_in_the_table_fails(strategy: str) -> None:
    """A strategy that was not run with a release is not supported there."""
    for release, counts in json.loads(RESULTS.read_text()).items():
        passed, failed = counts[strategy]
        assert passed and not failed, release


def test_a_report_is_counted_by_strategy(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    of_one = {"ddp": [0, 1], "fsdp-tensor": [1, 0], "pipeline": [1, 0]}
    assert counts_of(report) == of_one
    further = tmp_path / "servers.xml"
    further.write_text(OF_SERVERS)
    assert counts_of(report, further) == {**of_one, "async-diloco": [1, 0], "fsdp": [1, 0]}


def test_a_strategy_with_two_names_has_one_row() -> None:
    lines = table({"2.13.0": {"fsdp": [6, 0]}}).splitlines()
    assert "| `fsdp`, `zero3` | 6 passed |" in lines
    assert not any(line.startswith("| `zero3`") for line in lines)
