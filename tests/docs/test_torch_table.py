"""The table of strategies by release of torch says what was run."""

import json
from pathlib import Path

import pytest
from support.docs.torch_table import PAGE, RESULTS, counts_of, page_with

REPORT = """<testsuites><testsuite>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[fsdp-tensor-4-sgd]"/>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[ddp-2-sgd]">
<failure/></testcase>
<testcase classname="tests.worker.strategies.test_equality" name="test_equal[zero1-2]">
<skipped/></testcase>
<testcase classname="tests.worker.strategies.test_late_collectives" name="test_late[pipeline-]"/>
<testcase classname="tests.worker.test_torch_private" name="test_floor"/>
</testsuite></testsuites>"""


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text()
    assert page_with(page, json.loads(RESULTS.read_text())) == page


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor", "pipeline", "hybrid"])
def test_no_release_in_the_table_fails(strategy: str) -> None:
    for release, counts in json.loads(RESULTS.read_text()).items():
        passed, failed = counts[strategy]
        assert passed and not failed, release


def test_a_report_is_counted_by_strategy(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert counts_of(report) == {"ddp": [0, 1], "fsdp-tensor": [1, 0], "pipeline": [1, 0]}
