"""Nothing that a coordinator does for jobs can write to etcd without comparing the leader's key."""

import ast
from pathlib import Path

SERVER = Path(__file__).parents[2] / "server" / "shoal_server"
COORDINATOR = SERVER / "coordinator"

# They make the one store that the others have, or hold the election.
MAKERS = {"assembly.py", "process.py", "leadership/leader_failover.py"}
# They read; what they are given may be any store.
READERS = {
    "repair/inspection.py",
    "persistence/stored_jobs.py",
    "shards/current_maps.py",
    "shards/torch_versions.py",
}
WRITES = {"Put", "Delete"}


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_only_the_makers_have_a_store_that_writes_without_the_comparison() -> None:
    found = {
        str(path.relative_to(COORDINATOR))
        for path in COORDINATOR.rglob("*.py")
        if names_in(path) & {"KeyValueStore", "Keyspace", "EtcdClient"}
    }
    assert found - MAKERS - READERS == set(), "give it a LeaderStore"


def test_readers_write_nothing() -> None:
    for name in READERS - {"persistence/stored_jobs.py"}:
        assert not names_in(COORDINATOR / name) & WRITES, name
    # It makes the writes that the registry then has `DurableJobs` make.
    calls = [
        node
        for node in ast.walk(ast.parse((COORDINATOR / "persistence/stored_jobs.py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "transact"
    ]
    assert calls and not any("Put" in ast.unparse(call) for call in calls)


def test_what_is_written_for_a_job_goes_through_the_comparison() -> None:
    """`transact` is called by nobody else in the coordinator than who has a LeaderStore."""
    for path in COORDINATOR.rglob("*.py"):
        name = str(path.relative_to(COORDINATOR))
        tree = ast.parse(path.read_text())
        calls = any(
            isinstance(node, ast.Attribute) and node.attr == "transact" for node in ast.walk(tree)
        )
        if calls and name not in READERS:
            assert "LeaderStore" in names_in(path), name
