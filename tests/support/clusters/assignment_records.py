"""Assignment records that a test writes by hand."""

from dataclasses import replace

from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import assignments as records


async def write_assignments(store: KeyValueStore, assignments: JobAssignments) -> None:
    """Write the assignments to etcd, over any earlier ones."""
    placed = replace(assignments, placement_id=assignments.placement_id or "run")
    assert (await records.place(store, placed)).succeeded
