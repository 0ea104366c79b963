"""Training over MPI as a user starts it, and refused cases."""

from typing import Any

import pytest
import torch
from support.collectives import mpi_training
from support.processes.mpi_runs import MPIEXEC, run_under_mpiexec

import shoal
from shoal_proto.errors import InvalidSpec

pytestmark = pytest.mark.skipif(
    not MPIEXEC.exists(), reason="mpi needs an mpiexec beside the interpreter: pip install mpich"
)


@pytest.fixture(scope="module")
def reports() -> list[Any]:
    """Return the reports of two ranks, started once for all tests."""
    ended = run_under_mpiexec(2, "support.collectives.mpi_training.report")
    assert ended.code == 0, ended.output
    return [ended.reports[rank]["returned"] for rank in range(2)]


@pytest.mark.long
def test_ddp_under_mpiexec_trains_as_one_process_does(reports: list[Any]) -> None:
    for report in reports:
        for mine, expected in zip(report["parameters"], mpi_training.alone(), strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(expected), rtol=0, atol=1e-5
            )


@pytest.mark.long
def test_a_message_of_another_size_is_refused(reports: list[Any]) -> None:
    """MPI accepts a shorter message without an error and leaves the rest of the buffer
    unchanged."""
    assert "rank 1 sent 4 bytes, 12 are to be received" in reports[0]["short"]


def test_a_world_without_a_deadline_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="timeout_s"):
        shoal.init_mpi(timeout_s=0)
