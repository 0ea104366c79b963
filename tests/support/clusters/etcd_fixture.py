"""A real etcd for a test: `with running_etcd(tmp_path) as endpoint: ...`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.network import http

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


def ask_etcd(endpoint: str, method: str, **request: Any) -> Any:
    """Answer of etcd's JSON gateway, for methods that Shoal does not call. Bytes are in base64."""
    answer = http.post(f"http://{endpoint}/v3/{method}", request).raise_for_status()
    return answer.json()


__all__ = ["TEST_OPTIONS", "ask_etcd", "etcd_processes", "running_etcd"]
