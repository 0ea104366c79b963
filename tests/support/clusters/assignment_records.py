"""Assignment records that a test writes by hand."""

from dataclasses import replace

from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import assignments as records


async def write_assignments(store: KeyValueStore, assignments: JobAssignments) -> None:
    """Have etcd say so, whatever it said before."""
    placed = replace(assignments, run=assignments.run or "run")
    assert (await records.place(store, placed)).succeeded
