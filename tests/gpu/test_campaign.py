"""The campaign of `make gpu-test`: how it runs cases, and a run of all cases on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from gpu import campaign
from gpu.cases import CASES, Entry
from gpu.machine import Machine, shared_by_time
from support.processes.marked import Mark

ROOT = Path(__file__).parents[2]
ON_CPU = Machine(device="cpu", backend="gloo", num_gpus=0, full=False)
OWN_CASES = """
import subprocess, sys, time
from gpu.cases import Entry

def passes(case):
    case.figures["answer"] = 42
    case.on_gpu_only("milliseconds", 1.0)

def fails(case):
    case.figures["before"] = 1
    raise AssertionError("weights differ")

def leaves(case):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

def hangs(case):
    leaves(case)
    time.sleep(600)

CASES = {
    run.__name__: Entry(title=run.__name__, run=run, limit_s=limit_s)
    for run, limit_s in ((fails, 60), (hangs, 3), (leaves, 60), (passes, 60))
}
"""


@pytest.fixture
def own_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Entry]:
    """Cases of the test's own, which the campaign's processes find as well."""
    (tmp_path / "own_cases.py").write_text(OWN_CASES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found: dict[str, Mapping[str, Entry]] = {}
    exec(OWN_CASES, found)
    return found["CASES"]


def run_of(out: Path, entries: Mapping[str, Entry], seconds: float) -> list[dict[str, object]]:
    """The lines that a campaign with these cases has written."""
    campaign.Campaign(
        machine=ON_CPU, out=out, seconds=seconds, patience=1.0, cases=entries, module="own_cases"
    ).run()
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_case_that_fails_or_hangs_does_not_keep_the_others_from_being_run(
    tmp_path: Path, own_cases: Mapping[str, Entry]
) -> None:
    lines = run_of(tmp_path / "out", own_cases, 120.0)
    by_name = {str(line["name"]): line for line in lines}
    assert [line["name"] for line in lines] == ["fails", "hangs", "leaves", "passes"]
    assert [line["passed"] for line in lines] == [False, False, False, True]
    assert "weights differ" in str(by_name["fails"]["error"])
    assert by_name["fails"]["figures"] == {"before": 1}
    assert str(by_name["hangs"]["error"]).startswith("not over after 3 s")
    assert "processes were left" in str(by_name["leaves"]["error"])
    assert by_name["passes"]["figures"] == {"answer": 42}
    assert by_name["passes"]["left_out"] == ["milliseconds"]
    assert "error" not in by_name["passes"]
    whole = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert whole["cases"] == lines and whole["versions"]["torch"]


@pytest.mark.nightly
def test_a_campaign_ends_in_time(tmp_path: Path, own_cases: Mapping[str, Entry]) -> None:
    """Cases that are left at that time are reported as not run."""
    lines = run_of(tmp_path / "out", {"hangs": own_cases["hangs"], **own_cases}, 6.0)
    assert [line["passed"] for line in lines] == [False] * 4
    assert lines[-1]["error"] == "not run: the 6 s are over"


def test_an_interrupt_leaves_no_process_of_a_case(
    tmp_path: Path, own_cases: Mapping[str, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of the running case end, and those of the next one, which is already importing."""
    marks: list[Mark] = []

    class Noted(Mark):
        def __init__(self) -> None:
            super().__init__()
            marks.append(self)

    def interrupted(running: campaign.Running, *_: object) -> str:
        stdin = running.process.stdin
        assert stdin is not None and running.mark.processes()
        stdin.write(b"go\n")
        stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "Mark", Noted)
    monkeypatch.setattr(campaign.Running, "finish", interrupted)
    entries = {name: own_cases[name] for name in ("hangs", "passes")}
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path / "out", entries, 60.0)
    assert len(marks) == 2
    assert not any(mark.await_none(5.0) for mark in marks)


def test_cases_are_chosen_by_name_and_run_by_importance() -> None:
    assert list(campaign.chosen("L, K1")) == ["K1", "L"]
    assert list(campaign.chosen("")) == list(CASES)
    with pytest.raises(SystemExit, match="no such case: K9; there are: N, O1"):
        campaign.chosen("K9")


@pytest.mark.long
def test_a_campaign_without_a_gpu_ends_with_the_reason(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "gpu.campaign", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no GPU that torch" in done.stderr and "--device cpu" in done.stderr
    assert "CUDA_VISIBLE_DEVICES is ''" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", " ,"], "names no case; there are: N, O1"),
        (["--backend", "nccl"], "NCCL moves memory of GPUs only"),
        (["--seconds", "0"], "--seconds 0: a number above 0"),
        (["--seconds", "nan"], "--seconds nan: a number above 0"),
        (["--out", "a file"], "no folder"),
        (["--out", "a file/below"], "nothing can be written there"),
        (["--out", "mine", "--only", "A"], "a A that is not of these cases"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_a_case_begins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    (tmp_path / "mine" / "A").mkdir(parents=True)
    (tmp_path / "mine" / "A" / "thesis.txt").write_text("three years")
    with pytest.raises(SystemExit) as refused:
        campaign.main(["--device", "cpu", "--only", "N", *arguments])
    assert says in f"{refused.value}{capsys.readouterr().err}"
    assert (tmp_path / "mine" / "A" / "thesis.txt").exists()


def test_ranks_take_gpus_in_turn() -> None:
    two = Machine(device="cuda", backend="nccl", num_gpus=2, full=True)
    assert [two.visible_gpu(rank, "") for rank in range(4)] == ["0", "1", "0", "1"]
    assert [two.visible_gpu(rank, "5,7") for rank in range(3)] == ["5", "7", "5"]
    assert [two.visible_gpu(rank, "5, 7,-1,3") for rank in range(3)] == ["5", "7", "5"]
    assert two.shares_gpus and not ON_CPU.shares_gpus


def test_variables_of_nccl_are_set_only_for_shared_gpus() -> None:
    """An image's variables of torch are passed on; those of Shoal are not."""
    image = {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "SHOAL_JOB": "x"}
    one = Machine(device="cuda", backend="nccl", num_gpus=1, full=True).environment(image)
    assert one["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "NCCL_NVLS_ENABLE" not in one
    assert one["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1" and "SHOAL_JOB" not in one
    four = Machine(device="cuda", backend="nccl", num_gpus=4, full=True).environment(image)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in four and four["NCCL_NVLS_ENABLE"] == "1"


def test_a_gpu_is_shared_through_mps_while_the_cases_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the control program of MPS records its arguments and its input."""
    program = tmp_path / "nvidia-cuda-mps-control"
    log = tmp_path / "record"
    program.write_text(
        f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" "$@" >> {log}\n[ -n "$1" ] || cat >> {log}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    one = Machine(device="cuda", backend="nccl", num_gpus=1, full=True)
    with shared_by_time(one, tmp_path) as variables:
        pipes = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert log.read_text().splitlines() == [f"{pipes} -d"]
    assert log.read_text().splitlines() == [f"{pipes} -d", pipes, "quit"]
    with shared_by_time(ON_CPU, tmp_path) as variables:
        assert variables == {}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_case_passes_on_a_cpu(tmp_path: Path) -> None:
    """Real clusters, processes and signals over Gloo with small models show that the cases
    themselves work."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "gpu.campaign", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    failed = {line["name"]: line["error"] for line in lines if not line["passed"]}
    assert not failed and done.returncode == 0, failed or done.stderr
    assert [line["name"] for line in lines] == list(CASES)
    assert len(lines) == 20
