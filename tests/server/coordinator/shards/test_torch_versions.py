"""Parameter servers that compute with several versions of torch are reported, and keep working."""

from contextlib import closing

import pytest
import torch
from structlog.testing import capture_logs
from support.clusters.parameter_servers import ParameterServers
from support.clusters.snapshot_cluster import Pusher
from support.processes.served_process import awaited

from shoal_server.coordinator.shards.torch_versions import TorchVersions
from shoal_server.core.processes import Holder
from shoal_server.etcd.records.servers import Server
from shoal_server.status.shards import ShardReader

LIMIT_S = 20.0
OTHER = "9.9.9"


def server(name: str, torch_version: str) -> Server:
    return Server(holder=Holder(name, "one"), address="a:1", torch_version=torch_version)


def mixtures(*present: list[Server]) -> list[dict[str, list[str]]]:
    """Return the mixtures logged for these lists of servers, one after the other."""
    versions = TorchVersions()
    with capture_logs() as logs:
        for servers in present:
            versions.note(servers)
    return [line["servers"] for line in logs]


def test_each_mixture_is_logged_when_it_begins() -> None:
    """A mixture that comes back is logged again; a server without a version does not count."""
    a, b, c, silent = server("a", "2.5"), server("b", "2.6"), server("c", "2.6"), server("d", "")
    assert mixtures([a], [a, silent], []) == []
    mixed, wider = {"2.5": ["a"], "2.6": ["b"]}, {"2.5": ["a"], "2.6": ["b", "c"]}
    assert mixtures([a, b], [b, a], [c, b, a], [c, b], [b, a]) == [mixed, wider, mixed]


def test_a_job_on_several_versions_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator's log and the job's status both show the versions."""
    own = torch.__version__
    with capture_logs() as logs, ParameterServers(1) as servers:
        monkeypatch.setattr(torch, "__version__", OTHER)
        servers.add("ps-1")

        def warned_of() -> object:
            return next((e["servers"] for e in logs if e["event"] == "torch_versions_differ"), None)

        with closing(Pusher(servers, "w0", weight=1.0)) as member:
            member.push()
            assert awaited(warned_of, LIMIT_S, "the warning is logged") == {
                own: ["ps-0"],
                OTHER: ["ps-1"],
            }
            reader = ShardReader(servers.store)
            view = servers.run(reader.read("job"))
            servers.run(reader.close())
    assert view is not None
    assert {each.server_id: each.torch_version for each in view.servers} == {
        "ps-0": own,
        "ps-1": OTHER,
    }
