"""Training over MPI as a user starts it, and what is refused."""

import mpi_training
import pytest
import torch
from mpi_runs import MPIEXEC, run_under_mpiexec

import shoal
from shoal_proto.errors import InvalidSpec

pytestmark = pytest.mark.skipif(
    not MPIEXEC.exists(), reason="mpi needs an mpiexec beside the interpreter: pip install mpich"
)


def test_ddp_under_mpiexec_trains_as_one_process_does() -> None:
    ended = run_under_mpiexec(2, "mpi_training.by_ddp")
    assert ended.code == 0, ended.output
    for rank in range(2):
        ours = ended.reports[rank]["returned"]
        for mine, expected in zip(ours, mpi_training.alone(), strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(expected), rtol=0, atol=1e-5
            )


def test_a_world_without_a_deadline_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="timeout_s"):
        shoal.init_mpi(timeout_s=0)
