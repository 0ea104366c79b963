"""Loading of a snapshot's shards by the servers to which they are assigned.

If a server leaves or ends, its unloaded shards are assigned to others. Loaded ones stay with it,
since members may have pushed to them.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import structlog

from shoal_proto.errors import DeadlineExceeded, ShoalError
from shoal_proto.v1 import snapshots_pb2 as pb
from shoal_server.coordinator.servers.answering import Choose, servers_for
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.placement import least_loaded
from shoal_server.etcd import keys
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments
from shoal_server.snapshots import messages
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest

log = structlog.get_logger(__name__)

LOAD_WITHIN_S = 1800.0
MAX_CHOICES = 3
"""Maximum number of times that servers are chosen: again if some end before they have loaded."""
MAX_TRIES = 3
"""Maximum number of attempts to reassign shards while their records change."""


class SnapshotLoader:
    """Has servers load snapshots, on one event loop. `choose` selects the live servers."""

    def __init__(self, store: LeaderStore, calls: ServerCalls, choose: Choose) -> None:
        self._store = store
        self._calls = calls
        self._choose = choose

    async def present(self, job: str) -> Mapping[Holder, str]:
        """Servers for shards, with their addresses. Raises NoServers."""
        return await servers_for(self._store, self._choose, job)

    async def load_all(
        self,
        library: SnapshotLibrary,
        manifest: Manifest,
        wanted: JobAssignments,
        present: Mapping[Holder, str],
    ) -> JobAssignments:
        """Have every shard loaded by its primary; return the final assignments.

        Raises the error of a present server, or of any server after MAX_CHOICES; NoServers; and
        what `_reassign` raises.
        """
        to_load: Collection[ShardAssignment] = wanted.shards
        for choice in range(1, MAX_CHOICES + 1):
            failed = await self._load(library, manifest, to_load, present)
            if not failed:
                return wanted
            present = await self.present(manifest.job)
            for holder, error in failed.items():
                if holder in present or choice == MAX_CHOICES:
                    raise error
            log.warning(
                "servers_reassigned",
                job=manifest.job,
                gone=sorted(holder.server_id for holder in failed),
                reasons=sorted({str(error) for error in failed.values()}),
            )
            moved = await self._reassign(manifest, wanted, failed, sorted(present))
            to_load = moved.values()
            shards = (moved.get(shard.shard_id, shard) for shard in wanted.shards)
            wanted = replace(wanted, shards=tuple(shards))
        raise AssertionError("the last choice returns or raises")

    async def _load(
        self,
        library: SnapshotLibrary,
        manifest: Manifest,
        shards: Collection[ShardAssignment],
        present: Mapping[Holder, str],
    ) -> Mapping[Holder, ShoalError]:
        """Have servers load the shards; return the errors by server."""
        parts = {part.shard_id: part for part in manifest.parts}
        files: dict[Holder, list[pb.ShardFile]] = {}
        for shard in shards:
            of_holder = files.setdefault(shard.primary, [])
            of_holder.append(messages.encode_entry(parts[shard.shard_id]))
        failed = {}

        async def load(holder: Holder) -> None:
            request = pb.LoadRequest(job=manifest.job, url=library.storage.url, files=files[holder])
            try:
                await self._calls.call(
                    present[holder], lambda stub: stub.Load, request, LOAD_WITHIN_S
                )
            except ShoalError as error:
                failed[holder] = error

        async with asyncio.TaskGroup() as loading:
            for holder in files:
                loading.create_task(load(holder))
        return failed

    async def _reassign(
        self,
        manifest: Manifest,
        wanted: JobAssignments,
        gone: Collection[Holder],
        present: Sequence[Holder],
    ) -> dict[int, ShardAssignment]:
        """Reassign the shards that the servers in `gone` have not loaded; return the new
        assignments. Raises DeadlineExceeded after another restore, or if records changed during
        each attempt."""
        of_placement = keys.assignments_of_placement(wanted.job, wanted.placement_id)
        moved: dict[int, ShardAssignment] = {}
        for _ in range(MAX_TRIES):
            listed = (await self._store.range(of_placement)).items
            if not listed:
                break
            stored = [assignments.parse_shard(item) for item in listed]
            unloaded = [each for each in stored if _is_unloaded(each.assignment, gone)]
            held = [each.assignment for each in stored if each not in unloaded]
            shards = [each.assignment for each in unloaded]
            targets = _moved(shards, held, manifest, present)
            for at in range(0, len(unloaded), assignments.SHARDS_A_TRANSACTION):
                batch = slice(at, at + assignments.SHARDS_A_TRANSACTION)
                # The records show writes with a lost answer.
                _, items = await assignments.change(self._store, unloaded[batch], targets[batch])
                current = {assignments.parse_shard(item).assignment for item in items}
                moved |= {each.shard_id: each for each in targets[batch] if each in current}
            if all(target.shard_id in moved for target in targets):
                return moved
        raise DeadlineExceeded(
            f"the holders of job {wanted.job} changed while it was restored", fix="Restore again."
        )


def _is_unloaded(shard: ShardAssignment, gone: Collection[Holder]) -> bool:
    return shard.content is ShardContent.LOADING and shard.primary in gone


def _moved(
    shards: Sequence[ShardAssignment],
    held: Collection[ShardAssignment],
    manifest: Manifest,
    present: Sequence[Holder],
) -> list[ShardAssignment]:
    """Assign each shard to a present server, in a new epoch. `held`: the other shards."""
    num_bytes = {part.shard_id: part.num_bytes for part in manifest.parts}
    loads: Counter[Holder] = Counter()
    for shard in held:
        loads[shard.primary] += num_bytes[shard.shard_id]
    sizes = {shard.shard_id: num_bytes[shard.shard_id] for shard in shards}
    primaries = least_loaded(sizes, present, loads)
    return [
        replace(
            shard,
            epoch=shard.epoch + 1,
            primary=primaries[shard.shard_id],
            backups=(),
            joining=None,
            successor=None,
        )
        for shard in shards
    ]
