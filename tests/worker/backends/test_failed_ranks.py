"""A rank that fails: every other rank gets an error or is ended within the deadline."""

from pathlib import Path

import pytest
import torch.distributed as dist
from support.collectives import failing_ranks
from support.collectives.failing_ranks import FAILING, Broken
from support.processes.gpu_ranks import lacks_gpus
from support.processes.load import unhurried
from support.processes.mpi_runs import MPIEXEC, run_under_mpiexec
from support.processes.ranks import Ranks

import shoal

needs_mpiexec = pytest.mark.skipif(
    not MPIEXEC.exists(), reason="mpi needs an mpiexec beside the interpreter: pip install mpich"
)


@pytest.mark.parametrize("how", ["raise", "kill", pytest.param("stop", marks=pytest.mark.long)])
def test_over_gloo_every_survivor_gets_an_error(tmp_path: Path, how: str) -> None:
    """Ranks that are not neighbours of the failed one get the error too."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(failing_ranks.over_gloo, path, rank, 4, how) for rank in range(4)]
        for rank in (0, 2, 3):
            assert crew[rank].expect("failed")["text"]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_in_memory_every_survivor_gets_an_error(world_size: int) -> None:
    """The deadline is an hour away: the error must come at once."""
    errors: dict[int, str] = {}

    def body() -> None:
        try:
            failing_ranks.one_raises()
        except dist.DistBackendError as error:
            errors[dist.get_rank()] = str(error)
            raise

    with pytest.raises(Broken, match="on purpose"):
        shoal.run_in_memory(body, world_size, timeout_s=3600)
    assert set(errors) == set(range(world_size)) - {FAILING}
    assert all("rank 1 raised Broken: on purpose" in text for text in errors.values())


@pytest.mark.long
@needs_mpiexec
def test_under_mpiexec_every_survivor_gets_the_error_of_the_failed_rank() -> None:
    """The survivors neither wait nor are ended by MPI's launcher before they have reported the
    error."""
    ended = run_under_mpiexec(4, "support.collectives.failing_ranks.one_raises", timeout_s=3600)
    assert ended.code != 0
    assert ended.reports.pop(FAILING) == {"raised": "Broken", "text": "on purpose"}
    assert set(ended.reports) == {0, 2, 3}
    for report in ended.reports.values():
        assert report["raised"] == "DistBackendError"
        assert "rank 1 raised Broken: on purpose" in report["text"]


@pytest.mark.long
@needs_mpiexec
def test_under_mpiexec_a_wait_for_a_rank_that_does_not_come_ends_at_its_deadline() -> None:
    limit_s = round(unhurried(2.0))  # the other ranks come within it
    body = "support.collectives.failing_ranks.one_does_not_come"
    ended = run_under_mpiexec(3, body, timeout_s=limit_s)
    assert ended.code != 0
    assert set(ended.reports) == {0, 2}
    for report in ended.reports.values():
        assert report["raised"] == "DistBackendError"
        assert f"waited more than {limit_s} s in all_reduce" in report["text"]


@pytest.mark.long
@needs_mpiexec
def test_under_mpiexec_a_rank_that_is_killed_ends_the_job() -> None:
    ended = run_under_mpiexec(3, "support.collectives.failing_ranks.one_is_killed", timeout_s=3600)
    assert ended.code != 0
    assert FAILING not in ended.reports


@pytest.mark.skipif(bool(lacks_gpus(2)), reason=lacks_gpus(2))
@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_over_nccl_the_survivor_gets_an_error(tmp_path: Path, how: str) -> None:
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(failing_ranks.over_nccl, path, rank, 2, how) for rank in range(2)]
        assert crew[0].expect("failed")["recognised"]
        assert crew[0].join() == 0


@pytest.mark.skipif(bool(lacks_gpus(2)), reason=lacks_gpus(2))
def test_over_nccl_a_cut_ends_collectives_that_hang_in_two_groups(tmp_path: Path) -> None:
    """A cut takes seconds, although a collective may take 60 s."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(failing_ranks.cut_over_nccl, path, rank) for rank in range(2)]
        assert crew[0].expect("checked")["seconds"] < unhurried(2.0)
        assert crew[0].expect("retired")["seconds"] < unhurried(4.0)
        assert crew[0].join() == 0
