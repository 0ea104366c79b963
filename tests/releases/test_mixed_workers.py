"""Workers of two releases take the steps of one synchronous generation together."""

import re
from pathlib import Path
from subprocess import Popen

import pytest
from e2e.conftest import Shoal, finish, shoal_command
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.processes.served_process import awaited
from support.releases.recorded import environment
from support.training.counted_updates import counting_script

from shoal_client.local.process import Supervisor

EPOCHS, STEPS_PER_EPOCH, RATE = 2, 28, 2.0**-10
WEIGHTED = ("len(batch.inputs))\n", "len(batch.inputs), weight=len(batch.inputs))\n")
"""Something that the earlier form of the messages of a step cannot tell."""

__all__ = ["shoal_command"]


def trained(
    command: Shoal, directory: Path, coordinator: str, workers: tuple[str, str], script: str
) -> list[tuple[int, str]]:
    """Exit code and output of two launchers with a worker each, of these releases."""
    (directory / "train.py").write_text(script)
    (directory / "done").touch()
    with running_etcd(directory) as etcd, Supervisor(grace_s=5.0) as supervisor:
        given = environment(coordinator, directory / "releases")
        process = CoordinatorProcess(supervisor, directory, "c", etcd, environment=given).ready()
        awaited(process.leads, 60.0, "the coordinator leads")

        def run(release: str) -> "Popen[str]":
            code = environment(release, directory / "releases")
            at = {"SHOAL_COORDINATOR": process.grpc, "OMP_NUM_THREADS": "1"}
            bounds = ("-n", "1", "--max", "2", "--desired", "2", "--job", "mixed")
            return command.start("run", *bounds, "train.py", "ddp", environment={**at, **code})

        return [finish(each) for each in [run(release) for release in workers]]


@pytest.mark.long
@pytest.mark.parametrize("coordinator", ["now", "0.1.0"])
def test_a_worker_of_the_release_before_steps_with_one_of_now(
    shoal_command: Shoal, tmp_path: Path, coordinator: str
) -> None:
    script = counting_script(EPOCHS, STEPS_PER_EPOCH, RATE)
    for code, output in trained(shoal_command, tmp_path, coordinator, ("0.1.0", "now"), script):
        assert code == 0, output
        (found,) = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
        assert {float(each) for each in found} == {EPOCHS * STEPS_PER_EPOCH}, output


@pytest.mark.long
def test_workers_of_now_do_all_they_can_under_a_coordinator_of_the_release_before(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    script = counting_script(EPOCHS, STEPS_PER_EPOCH, RATE).replace(*WEIGHTED)
    assert WEIGHTED[1] in script
    for code, output in trained(shoal_command, tmp_path, "0.1.0", ("now", "now"), script):
        assert code == 0, output
        (found,) = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
        assert {float(each) for each in found} == {EPOCHS * STEPS_PER_EPOCH}, output


@pytest.mark.long
def test_what_a_worker_of_the_release_before_cannot_be_told_is_refused_by_name(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    script = counting_script(EPOCHS, STEPS_PER_EPOCH, RATE)
    has_it = "hasattr(session, 'evaluate')"
    loss = "model(batch.inputs).sum() / len(batch.inputs)"
    said = f"session.backward({loss}, **({{'weight': 1}} if {has_it} else {{}}))"
    script = script.replace(f"session.backward({loss})", said)
    assert said in script
    # The worker of now ends; the other one would wait for a second member for as long as it may.
    (tmp_path / "train.py").write_text(script)
    with running_etcd(tmp_path) as etcd, Supervisor(grace_s=5.0) as supervisor:
        process = CoordinatorProcess(supervisor, tmp_path, "c", etcd).ready()
        awaited(process.leads, 60.0, "the coordinator leads")
        at = {"SHOAL_COORDINATOR": process.grpc, "OMP_NUM_THREADS": "1"}
        before = environment("0.1.0", tmp_path / "releases")
        bounds = ("-n", "1", "--max", "2", "--desired", "2", "--job", "mixed", "train.py", "ddp")
        older = shoal_command.start("run", *bounds, environment={**at, **before})
        code, output = finish(shoal_command.start("run", *bounds, environment=at))
        assert code != 0, output
        assert "session.backward(loss, weight=...) beside members of release 0.1.0" in output
        (tmp_path / "done").touch()
        code, output = finish(older)
        assert code == 0, output
