"""A real etcd for a test: `with running_etcd(tmp_path) as endpoint: ...`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal_client.local.etcd import EtcdOptions, RunningEtcd, start_etcd
from shoal_client.local.process import Supervisor

TEST_OPTIONS = EtcdOptions(fsync=False)
"""A killed process loses nothing without fsync; only a crash of the machine would."""


@contextmanager
def running_etcd(directory: Path, options: EtcdOptions = TEST_OPTIONS) -> Iterator[str]:
    """Yield the host:port of an etcd that runs during the block, with its data in `directory`."""
    with Supervisor() as supervisor:
        (etcd,) = start_etcd(supervisor.spawn, directory / "etcd", options)
        yield etcd.endpoint


@contextmanager
def etcd_processes(
    directory: Path, options: EtcdOptions = TEST_OPTIONS, *, num_members: int = 1
) -> Iterator[tuple[Supervisor, tuple[RunningEtcd, ...]]]:
    """Start etcd for tests that kill it; yields the supervisor, to restart members with, and the
    members."""
    # A member whose peers are gone does not stop by itself.
    with Supervisor(grace_s=0.2) as supervisor:
        started = start_etcd(supervisor.spawn, directory / "etcd", options, num_members=num_members)
        yield supervisor, started


__all__ = ["TEST_OPTIONS", "etcd_processes", "running_etcd"]
