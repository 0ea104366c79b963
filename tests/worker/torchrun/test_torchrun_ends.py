"""Real `torchrun` whose nodes end at different times: the end of one does not affect the others."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.network import http
from support.processes.torchrun_world import Nodes, Step
from support.torchrun import apart

from shoal_client.local.cluster import LocalCluster
from shoal_client.local.process import Process
from shoal_proto.v1.membership_pb2 import DrainRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

START_S = 90.0
END_S = 60.0
UNDISTURBED_STEPS = 100
"""More steps than the detection of a killed node takes."""


@pytest.fixture
def nodes(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    job = f"ends-{request.node.originalname}-{tmp_path.name}"
    script = Path(apart.__file__)
    endpoint = cluster.coordinator
    with Nodes(endpoint=endpoint, job=job, directory=tmp_path, script=script) as running:
        yield running


def started(nodes: Nodes, *names: str, bounds: str = "1:2") -> list[Process]:
    """Start these nodes; return their agents once the nodes train together."""
    agents = [nodes.start(name, nodes=bounds, workers=1, restarts=1) for name in names]
    for name in names:
        steps = lambda step: step["node"] == name and step["world"] == len(names)  # noqa: E731, B023
        nodes.await_step(steps, START_S)
    return agents


def finish(nodes: Nodes, name: str) -> None:
    """End the node's workers; return once its agent waits for the others."""
    nodes.touch(f"done-{name}")
    nodes.await_line(name, "node_finished", END_S)


def drain(cluster: LocalCluster, job: str, *, rank: int) -> None:
    newest = http.get(f"{cluster.http_url}/api/v1/jobs/{job}/generations").json()[0]
    (name,) = [each["member_id"] for each in newest["members"] if each["rank"] == rank]
    with grpc.insecure_channel(cluster.coordinator) as channel:
        request = DrainRequest(job=job, member_id=name, reason="spot notice")
        MembershipStub(channel).Drain(request, timeout=END_S)


def of(nodes: Nodes, name: str) -> list[Step]:
    return [step for step in nodes.steps() if step["node"] == name]


def await_undisturbed(nodes: Nodes, name: str) -> None:
    """Wait until the node takes many more steps, in the process in which it took the others."""
    before = len(of(nodes, name))
    nodes.await_step(
        lambda step: step["node"] == name and len(of(nodes, name)) >= before + UNDISTURBED_STEPS,
        START_S,
    )
    assert len({step["pid"] for step in of(nodes, name)}) == 1, nodes.logs()


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "ended", "drained"])
def test_the_end_of_a_finished_node_does_not_disturb_the_other(
    nodes: Nodes, cluster: LocalCluster, how: str
) -> None:
    """The workers of the other node keep their process, and end with 0."""
    first, second = started(nodes, "first", "second")
    finish(nodes, "second")
    if how == "killed":
        nodes.kill(second)
    elif how == "ended":
        second.stop(END_S)
    else:
        drain(cluster, nodes.job, rank=of(nodes, "second")[0]["rank"])
        assert second.wait(END_S) == 0, nodes.logs()
    await_undisturbed(nodes, "first")
    nodes.touch("done-first")
    assert first.wait(END_S) == 0, nodes.logs()


@pytest.mark.long
@pytest.mark.parametrize("bounds", ["1:2", "2"])
def test_a_worker_that_fails_after_another_node_has_finished_is_restarted(
    nodes: Nodes, bounds: str
) -> None:
    """The worker trains to its end: the finished node counts for the minimum, and is not waited
    for."""
    first, second = started(nodes, "first", "second", bounds=bounds)
    finish(nodes, "second")
    nodes.touch("fail-first-0")
    again = nodes.await_step(lambda step: step["restarts"] == 1, START_S)
    assert (again["node"], again["world"]) == ("first", 1)
    assert second.wait(END_S) == 0, nodes.logs()
    nodes.touch("done-first")
    assert first.wait(END_S) == 0, nodes.logs()
    late = nodes.start("late", nodes=bounds, workers=1)
    assert late.wait(START_S) == 1
    assert "or give another job name" in (nodes.directory / "late.log").read_text()


@pytest.mark.long
def test_a_node_that_comes_after_another_has_finished_waits(nodes: Nodes) -> None:
    """The waiting node disturbs no other node, and learns when the others are done. It replaces a
    node that is lost."""
    agents = started(nodes, "first", "second", "third", bounds="1:3")
    finish(nodes, "third")
    late = nodes.start("late", nodes="1:3", workers=1)
    nodes.await_line("late", "job_joined", START_S)
    await_undisturbed(nodes, "first")
    assert not of(nodes, "late")

    nodes.kill(agents[1])
    nodes.await_step(lambda step: step["node"] == "late" and step["world"] == 2, START_S)
    assert agents[2].wait(END_S) == 0, nodes.logs()
    finish(nodes, "first")
    nodes.touch("done-late")
    assert [agents[0].wait(END_S), late.wait(END_S)] == [0, 0], nodes.logs()


@pytest.mark.long
def test_nodes_that_end_one_by_one_end_with_0(nodes: Nodes) -> None:
    """Agents wait for the last one, as with every backend."""
    agents = started(nodes, "first", "second")
    finish(nodes, "first")
    await_undisturbed(nodes, "second")
    assert agents[0].exit_code is None
    nodes.touch("done-second")
    assert [agent.wait(END_S) for agent in agents] == [0, 0], nodes.logs()


@pytest.mark.long
def test_a_node_without_restarts_left_fails_alone(nodes: Nodes) -> None:
    """The job does not count as completed: the same node may come again, and end it."""
    first, second = started(nodes, "first", "second")
    finish(nodes, "second")
    for restarts in range(2):
        nodes.touch(f"fail-first-{restarts}")
    assert [first.wait(START_S), second.wait(END_S)] == [1, 0], nodes.logs()
    nodes.touch("done-first")
    assert nodes.start("first", nodes="1:2", workers=1).wait(START_S) == 0, nodes.logs()
