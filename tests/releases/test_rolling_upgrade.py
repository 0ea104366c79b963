"""A cluster changes its release part by part, and back again, while jobs train."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.processes.commands import Shoal, finish, read_until, shoal_command
from support.processes.served_process import ServedProcess, awaited
from support.releases.builds import environment
from support.training.counted_updates import counting_script

from shoal_client.local.process import Supervisor
from shoal_server.etcd import keys
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

EPOCHS, STEPS_PER_EPOCH, RATE = 400, 28, 2.0**-10
LEADS_WITHIN_S = 60.0

SCRIPT = counting_script(EPOCHS, STEPS_PER_EPOCH, RATE)

__all__ = ["shoal_command"]


class Cluster:
    """A coordinator and parameter servers, each of the release that it was started with."""

    def __init__(self, supervisor: Supervisor, directory: Path, etcd: str) -> None:
        self._supervisor = supervisor
        self._directory = directory
        self.etcd = etcd
        self._servers: list[ServedProcess] = []
        self._started = 0
        self.coordinator: CoordinatorProcess | None = None

    @property
    def address(self) -> str:
        assert self.coordinator is not None
        return self.coordinator.grpc

    def coordinate(self, release: Mapping[str, str]) -> None:
        """Start a coordinator of the release at the address of the current one, which is ended
        first."""
        listen = "127.0.0.1:0"
        if self.coordinator is not None:
            listen = self.coordinator.grpc
            self.coordinator.process.send_signal(signal.SIGTERM)
            assert self.coordinator.process.wait(30.0) is not None
        self._started += 1
        name = f"coordinator-{self._started}"
        self.coordinator = CoordinatorProcess(
            *(self._supervisor, self._directory, name, self.etcd),
            listen=listen,
            environment=release,
        ).ready()
        awaited(self.coordinator.leads, LEADS_WITHIN_S, f"{name} leads")

    def serve(self, release: Mapping[str, str], count: int) -> None:
        """Start `count` parameter servers of the release, and end those that ran before."""
        before, self._servers = self._servers, []
        for position in range(count):
            self._started += 1
            name = f"ps-{self._started}"
            given = ("ps", "--etcd", self.etcd, "--listen", "127.0.0.1:0", "--id", name)
            server = ServedProcess(
                self._supervisor, self._directory, name, *given, environment=release
            )
            self._servers.append(server.ready())
            if position < len(before):
                before[position].process.send_signal(signal.SIGTERM)
                assert before[position].process.wait(60.0) == 0, before[position].log_path


def job_records(etcd: str) -> dict[str, dict[str, object]]:
    """The state record of each job, by job."""

    async def read() -> dict[str, dict[str, object]]:
        async with EtcdClient(EtcdConfig(endpoints=(etcd,))) as store:
            found = await store.range(keys.JOBS)
        records = {item.key: item.value for item in found.items if item.key.endswith("/state")}
        return {key.split("/")[-2]: json.loads(value) for key, value in records.items()}

    return asyncio.run(read())


@contextmanager
def running_cluster(directory: Path) -> Iterator[Cluster]:
    with running_etcd(directory) as etcd, Supervisor(grace_s=5.0) as supervisor:
        yield Cluster(supervisor, directory, etcd)


@pytest.mark.nightly
@pytest.mark.parametrize("order", [("now", "next", "now"), ("next", "now", "next")])
def test_jobs_train_on_while_a_cluster_changes_its_release_and_goes_back(
    shoal_command: Shoal, tmp_path: Path, order: tuple[str, str, str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    releases = [environment(release, tmp_path / "releases") for release in order]
    outputs: dict[str, list[str]] = {}

    def run(strategy: str, release: Mapping[str, str]) -> "Popen[str]":
        given = {"SHOAL_COORDINATOR": cluster.address, "OMP_NUM_THREADS": "1", **release}
        bounds = ("-n", "2", "--max", "4", "--job", strategy)
        started = shoal_command.start("run", *bounds, "train.py", strategy, environment=given)
        # The worker trains with those of the other release, if there are any.
        outputs[strategy] = read_until(started, "stepped on 20")
        return started

    def step_on() -> None:
        for strategy, each in runs.items():
            outputs[strategy] += read_until(each, "stepped on", count=4)

    with running_cluster(tmp_path) as cluster:
        cluster.coordinate(releases[0])
        cluster.serve(releases[0], 2)
        runs = {strategy: run(strategy, releases[0]) for strategy in ("ddp", "async-sgd")}
        for release in releases[1:]:
            cluster.coordinate(release)
            step_on()
            cluster.serve(release, 2)
            step_on()
            for strategy, before in runs.items():
                runs[strategy] = run(strategy, release)
                before.send_signal(signal.SIGTERM)
                code, output = finish(before)
                assert code in (0, 143), output
            step_on()
        # A coordinator of the next release has written every job, and other coordinators have
        # since.
        records = job_records(cluster.etcd)
        assert set(records) == set(runs)
        assert all("of_the_next_release" in record for record in records.values()), records
        (tmp_path / "done").touch()
        for strategy, each in runs.items():
            code, output = finish(each, outputs[strategy])
            assert code == 0, output
            found = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
            assert len(found) == 2, output
            weights = {float(weight) for one in found for weight in one[1:]}
            assert len(weights) == 1, output
            again = weights.pop() - EPOCHS * STEPS_PER_EPOCH
            # Samples that were leased shortly before a coordinator ended are leased again.
            assert 0 <= again <= (40 if strategy == "async-sgd" else 0), output
        for name in ("coordinator-1", "coordinator-4", "coordinator-7"):
            logged = [json.loads(line) for line in (tmp_path / f"{name}.log").open()]
            assert "job_set_aside" not in {line.get("event") for line in logged}
            # A generation may be aborted only because a member was drained while it formed.
            aborted = [line["reason"] for line in logged if line.get("event") == "phase_aborted"]
            assert all("left: drained" in reason for reason in aborted), aborted
