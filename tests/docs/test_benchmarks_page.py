"""The page of benchmarks as `make report` writes it."""

import json
import sys
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
RAN = {
    "day": "2026-11-28",
    "versions": {"python": "3.12.3", "torch": "2.11.0+cu130", "gpus": "NVIDIA H100, 580.159"},
    "machine": {"device": "cuda", "backend": "nccl", "num_gpus": 1, "full": True},
    "cases": [
        {
            "name": "O1",
            "title": "a step beside plain DDP's",
            "passed": True,
            "seconds": 61.5,
            "figures": {"gpt_ddp_ms": [50.12345, 50.2], "resumed": 1},
        },
        {
            "name": "K1",
            "title": "kills in backward",
            "passed": False,
            "seconds": 9.0,
            "error": "Traceback (most recent call last):\nAssertionError: 3 s | to the next step",
        },
    ],
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """bench/report.py, set to a folder of pages of the test's own."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    spec = util.spec_from_file_location("bench_report", BENCH / "report.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {
        "DOCS": tmp_path,
        "RESULTS": tmp_path / "results",
        "ON_GPU": tmp_path / "benchmarks" / "results" / "gpu.json",
    }.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_a_run_on_a_gpu_is_shown_with_its_device_and_versions(
    report: ModuleType, tmp_path: Path
) -> None:
    """The rest of the page stays; a failed case is shown, too."""
    (tmp_path / "benchmarks.md").write_text("# Benchmarks\n\n## recovery\n\nkept\n")
    report.ON_GPU.parent.mkdir(parents=True)
    report.ON_GPU.write_text(json.dumps(RAN))
    report.main()
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.index("## gpu") < page.index("## recovery") < page.index("kept")
    assert "2026-11-28: 1 of 2 cases passed. The machine: NVIDIA H100, 580.159;" in page
    assert "torch 2.11.0+cu130; backend nccl." in page
    ddp = "gpt_ddp_ms 50.12 / 50.2, resumed 1"
    assert f"| O1: a step beside plain DDP's | yes | 61.5 | {ddp} |" in page
    fault = r"AssertionError: 3 s \| to the next step"
    assert f"| K1: kills in backward | no | 9 | {fault} |" in page


def test_without_any_result_there_is_no_page(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report of peers is still written, from committed results: this is not a failure."""
    report.main()
    assert "no results in" in capsys.readouterr().out
    assert not (tmp_path / "benchmarks.md").exists()


def test_the_plot_of_a_job_that_survives_shows_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures stored beside the SVG of the first page are its only source."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    survival = import_module("survival")
    record = json.loads(survival.RECORD.read_text())
    assert survival.plot(record) == survival.PLOT.read_text()
    pauses = record["systems"]["Shoal"]["longest_pause_s"]
    assert list(pauses) == [name for name, _ in survival.EVENTS]
    assert max(pauses.values()) < 3.0
