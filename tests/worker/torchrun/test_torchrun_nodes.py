"""Real `torchrun` with a script that knows nothing of Shoal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.torchrun_world import Nodes

from shoal_client.local.access import LocalTls
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

START_S = 90.0
END_S = 60.0


@pytest.fixture
def nodes(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    job = f"nodes-{request.node.originalname}-{tmp_path.name}"
    with Nodes(endpoint=cluster.coordinator, job=job, directory=tmp_path) as running:
        yield running


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("workers", [1, 2])
def test_training_goes_on_after_a_lost_node_and_with_a_new_one(nodes: Nodes, workers: int) -> None:
    """Two nodes train, with one or two workers each. One is killed, agent and workers: the other
    continues alone. A third node comes: they train together again. They end together, and the job's
    name cannot be used again."""
    first = nodes.start("first", nodes="1:2", workers=workers, restarts=3)
    second = nodes.start("second", nodes="1:2", workers=workers, restarts=3)
    before = nodes.await_step(lambda step: step["world"] == 2 * workers, START_S)

    nodes.kill(second)
    alone = nodes.await_step(lambda step: step["world"] == workers, START_S)
    assert alone["agent"] == first.pid
    assert alone["port"] != before["port"]

    third = nodes.start("third", nodes="1:2", workers=workers, restarts=3)
    nodes.await_step(
        lambda step: step["world"] == 2 * workers and step["agent"] == third.pid,
        START_S,
    )
    nodes.stop()
    assert [node.wait(END_S) for node in (first, third)] == [0, 0], nodes.logs()
    assert second.exit_code == -9

    late = nodes.start("late", nodes="1:2")
    assert late.wait(START_S) == 1
    assert "or give another job name" in (nodes.directory / "late.log").read_text()


@pytest.mark.long
def test_failed_workers_are_restarted(nodes: Nodes) -> None:
    """torchrun restarts the workers of both nodes. They meet at once, in a store of their own: none
    reads an address of the previous workers."""
    (nodes.directory / "fail-1-0").touch()
    (nodes.directory / "fail-0-1").touch()
    agents = [nodes.start(name, nodes="2", workers=1, restarts=3) for name in ("first", "second")]
    again = nodes.await_step(lambda step: step["restarts"] >= 2, START_S)
    assert again["world"] == 2
    nodes.stop()
    assert [agent.wait(END_S) for agent in agents] == [0, 0], nodes.logs()
    assert len({step["port"] for step in nodes.steps()}) >= 3


@pytest.mark.long
def test_a_failure_for_good_fails_the_node(nodes: Nodes) -> None:
    """torchrun exits with 1 as ever when no restarts are left; the job does not count as
    completed."""
    (nodes.directory / "fail-0-0").touch()
    assert nodes.start("first", nodes="1", workers=1).wait(START_S) == 1
    nodes.stop()
    again = nodes.start("again", nodes="1", workers=1)
    assert again.wait(START_S) == 0, nodes.logs()


@pytest.mark.long
def test_an_agent_that_gets_a_signal_leaves(nodes: Nodes) -> None:
    """torchrun does not shut down the rendezvous then. The others still learn of it, at once and
    with the reason, and continue."""
    first, second = (
        nodes.start(name, nodes="1:2", workers=1, restarts=3) for name in ("first", "second")
    )
    nodes.await_step(lambda step: step["world"] == 2, START_S)
    assert second.stop(END_S) != 0
    nodes.await_step(lambda step: step["world"] == 1 and step["agent"] == first.pid, START_S)
    assert "left: its agent ended" in (nodes.directory / "first.log").read_text()
    nodes.stop()
    assert first.wait(END_S) == 0, nodes.logs()


@pytest.mark.long
def test_a_local_cluster_is_joined_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is like that of `shoal up`, with TLS; a scheduler gives each process a TMPDIR."""
    (tmp_path / "own").mkdir()
    config = LocalClusterConfig(directory=tmp_path / "up", num_parameter_servers=0, tls=LocalTls())
    with LocalCluster(config) as cluster:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
        monkeypatch.delenv("SHOAL_TLS", raising=False)
        with Nodes(endpoint=cluster.coordinator, job="own", directory=tmp_path) as nodes:
            nodes.stop()
            assert nodes.start("only", nodes="1", workers=1).wait(START_S) == 0, nodes.logs()
