"""The newest record of each shard that this server has read."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment


class KnownRecords:
    def __init__(self) -> None:
        self._assignments: dict[Key, ShardAssignment] = {}
        self._placement_ids: dict[Key, str] = {}
        self._writing: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._assignments

    def __getitem__(self, key: Key) -> ShardAssignment:
        return self._assignments[key]

    def find(self, key: Key) -> ShardAssignment | None:
        return self._assignments.get(key)

    @property
    def placement_ids(self) -> Mapping[Key, str]:
        """`JobAssignments.placement_id`, by shard."""
        return MappingProxyType(self._placement_ids)

    def keys_of(self, job: str) -> list[Key]:
        return [key for key in self._assignments if key[0] == job]

    def holders_of(self, keys: Iterable[Key]) -> frozenset[Holder]:
        known = (self._assignments[key] for key in keys)
        return frozenset(holder for a in known for holder in (a.primary, *a.backups))

    def is_of_another_placement(self, key: Key, placement_id: str) -> bool:
        return self._placement_ids.get(key, placement_id) != placement_id

    def store_record(
        self, key: Key, new: ShardAssignment | None, placement_id: str
    ) -> ShardAssignment | None:
        """Store a record, or remove it for None; return the previous one."""
        old = self._assignments.pop(key, None)
        if new is None:
            self._placement_ids.pop(key, None)
            self._writing.discard(key)
        else:
            self._assignments[key], self._placement_ids[key] = new, placement_id
        return old

    # --- writes of this server in progress ---

    def begin_write(self, key: Key) -> None:
        self._writing.add(key)

    def end_write(self, key: Key) -> None:
        self._writing.discard(key)

    def is_writing(self, key: Key) -> bool:
        return key in self._writing
