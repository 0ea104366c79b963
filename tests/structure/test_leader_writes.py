"""Writes of a coordinator to etcd for its jobs always compare the leader's key."""

import ast
from pathlib import Path

SERVER = Path(__file__).parents[2] / "server" / "shoal_server"
COORDINATOR = SERVER / "coordinator"

# Modules that make the one store that the others use, or that hold the election.
MAKERS = {"assembly.py", "process.py", "leadership/leader_failover.py"}
# Modules that only read; the store that they are given may be any.
READERS = {"repair/inspection.py", "persistence/stored_jobs.py"}
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
    # This module builds the writes that the registry passes on to `DurableJobs`.
    calls = [
        node
        for node in ast.walk(ast.parse((COORDINATOR / "persistence/stored_jobs.py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "transact"
    ]
    assert calls and not any("Put" in ast.unparse(call) for call in calls)


def test_modules_that_write_for_a_job_have_a_leader_store() -> None:
    """A module of the coordinator that calls `transact` has a LeaderStore."""
    for path in COORDINATOR.rglob("*.py"):
        name = str(path.relative_to(COORDINATOR))
        tree = ast.parse(path.read_text())
        calls = any(
            isinstance(node, ast.Attribute) and node.attr == "transact" for node in ast.walk(tree)
        )
        if calls and name not in READERS:
            assert "LeaderStore" in names_in(path), name
