"""Reports of a cluster's parts: moves of shards, metrics, a wrong address of etcd."""

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.clusters.etcd_fixture import running_etcd
from support.network.ports import free_port
from support.processes.commands import ANY_PORTS, Shoal, finish
from support.processes.served_process import ServedProcess, awaited
from torch import nn
from torch.nn.functional import mse_loss

import shoal
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import Supervisor

WITHIN_S = 60.0


def await_event(http: httpx.Client, job: str, kind: str, pattern: str) -> Mapping[str, Any]:
    """The first event of that kind whose text matches."""
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        events = http.get(f"/api/v1/jobs/{job}/events?limit=1000").json()["events"]
        for event in events:
            if event["kind"] == kind and re.search(pattern, event["reason"]):
                return dict(event)
        time.sleep(0.1)
    raise AssertionError(f"no {kind} that matches {pattern!r}: {events}")


def the_leader(http: httpx.Client, job: str) -> str:
    """The server that is primary of all shards of the job, once another server has a copy of
    each."""

    def found() -> str | None:
        shards = http.get(f"/api/v1/jobs/{job}/shards").json()["shards"]
        leaders = {shard["server_id"] for shard in shards}
        copied = all(
            any(not copy["joining"] for copy in shard["replication"]["copies"]) for shard in shards
        )
        return leaders.pop() if len(leaders) == 1 and copied else None

    return awaited(found, WITHIN_S, "one server that leads, and one that follows")


def metric(http: httpx.Client, line: str) -> float:
    """The value of the series with this name and these labels."""
    text = http.get("/metrics").text
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {line} in the metrics"
    return float(found[1])


@pytest.mark.nightly
def test_moves_and_failovers_of_shards_are_reported(tmp_path: Path) -> None:
    """Shards move from a server that ends in order, and a backup leads after a kill: both are
    events, and counted in metrics that begin at zero."""
    data = torch.randn(64, 8), torch.randn(64, 8)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = LocalClusterConfig(directory=tmp_path, num_parameter_servers=2)
    with (
        LocalCluster(config) as cluster,
        Supervisor() as supervisor,
        httpx.Client(base_url=cluster.http_url, trust_env=False) as http,
        shoal.join("moves", coordinator=cluster.coordinator) as session,
    ):
        model, optimizer = session.distribute(model, optimizer, "async-sgd")
        batches = iter(session.batches(data, global_batch_size=8, epochs=8))

        def train() -> None:
            batch = next(batches)
            with session.step():
                session.backward(mse_loss(model(batch.inputs), batch.targets))

        train()
        moved = 'shoal_job_events_total{job="moves",kind="shards_moved"}'
        assert metric(http, moved) == 0
        options = ("--etcd", cluster.etcd, "--listen", "127.0.0.1:0", "--id", "ps-2")
        came = ServedProcess(supervisor, tmp_path, "ps-2", "ps", *options).ready()
        cluster.processes["ps-0"].send_signal(signal.SIGTERM)
        pattern = r"^\d+ shards? moved from ps-0 to (ps-1|ps-2)$"
        await_event(http, "moves", "shards_moved", pattern)
        assert metric(http, moved) >= 1
        train()
        leader = the_leader(http, "moves")
        processes = {"ps-1": cluster.processes["ps-1"], "ps-2": came.process}
        processes[leader].send_signal(signal.SIGKILL)
        [other] = {"ps-1", "ps-2"} - {leader}
        pattern = rf"^lost {leader}: {other} leads \d+ shards? in its place, with every update"
        await_event(http, "moves", "server_lost", pattern)
        train()
        for batch in batches:
            with session.step():
                session.backward(mse_loss(model(batch.inputs), batch.targets))


@pytest.mark.long
def test_a_parameter_server_serves_its_metrics(shoal_command: Shoal, tmp_path: Path) -> None:
    """`--metrics` serves build, lag, calls and pushes; a port in use is refused."""
    with running_etcd(tmp_path) as etcd:
        port = free_port()
        options = ("--etcd", etcd, "--listen", "127.0.0.1:0", "--metrics", str(port))
        server = shoal_command.start("ps", *options, "--id", "ps-0")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            deadline_s, text = time.monotonic() + WITHIN_S, ""
            while time.monotonic() < deadline_s and not text:
                try:
                    text = http.get("/metrics").text
                except httpx.TransportError:
                    assert server.poll() is None, finish(server)[1]
                    time.sleep(0.1)
        for name in (
            *("shoal_build_info", "shoal_ps_call_duration_seconds"),
            *("shoal_ps_push_duration_seconds", "loop_lag"),
        ):
            assert name in text, text
        code, output = finish(shoal_command.start("ps", *options, "--id", "ps-1"))
        assert code == 1 and f"127.0.0.1:{port}" in output, output
        server.send_signal(signal.SIGTERM)
        assert finish(server)[0] == 0


@pytest.mark.long
def test_up_refuses_an_etcd_that_does_not_answer(shoal_command: Shoal) -> None:
    """Addresses without a listener, and texts that are not addresses, give an error; no process is
    left."""
    wrong = f"127.0.0.1:{free_port()}"
    code, output = finish(shoal_command.start("up", "--etcd", wrong, *ANY_PORTS))
    assert code == 1, output
    assert f"an etcd that answers at {wrong}" in output and "Check --etcd" in output
    assert "Traceback" not in output
    code, output = finish(shoal_command.start("up", "--etcd", "nowhere", *ANY_PORTS))
    assert code in (1, 2) and "nowhere" in output and "Traceback" not in output
    assert shoal_command.await_none(10.0) == {}
