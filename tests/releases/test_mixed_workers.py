"""Workers of two releases take the steps of one synchronous generation together."""

import re
from pathlib import Path
from subprocess import Popen

import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.processes.commands import Shoal, finish, shoal_command
from support.processes.served_process import awaited
from support.releases.builds import environment
from support.training.counted_updates import counting_script

from shoal_client.local.process import Supervisor

EPOCHS, STEPS_PER_EPOCH, RATE = 2, 28, 2.0**-10

__all__ = ["shoal_command"]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("coordinator", ["now", "next"])
def test_workers_of_two_releases_train_one_model(
    shoal_command: Shoal, tmp_path: Path, coordinator: str, strategy: str
) -> None:
    """Workers of both releases apply every update once, under a coordinator of either release."""
    (tmp_path / "train.py").write_text(counting_script(EPOCHS, STEPS_PER_EPOCH, RATE))
    (tmp_path / "done").touch()
    with running_etcd(tmp_path) as etcd, Supervisor(grace_s=5.0) as supervisor:
        of_coordinator = environment(coordinator, tmp_path / "releases")
        process = CoordinatorProcess(supervisor, tmp_path, "c", etcd, environment=of_coordinator)
        awaited(process.ready().leads, 60.0, "the coordinator leads")

        def run(release: str) -> "Popen[str]":
            code = environment(release, tmp_path / "releases")
            at = {"SHOAL_COORDINATOR": process.grpc, "OMP_NUM_THREADS": "1"}
            bounds = ("-n", "1", "--max", "2", "--desired", "2", "--job", "mixed")
            given = (*bounds, "train.py", strategy)
            return shoal_command.start("run", *given, environment={**at, **code})

        for code, output in [finish(each) for each in (run("next"), run("now"))]:
            assert code == 0, output
            assert "health_report_failed" not in output
            (found,) = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
            assert {float(each) for each in found} == {EPOCHS * STEPS_PER_EPOCH}, output
