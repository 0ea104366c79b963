"""The catalog of a server's shards by job and id, with the errors for shards that are missing."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import structlog

from shoal_proto import routes
from shoal_proto.errors import (
    DtypeMismatch,
    ProposalConflict,
    ShapeMismatch,
    ShardNotReady,
    ShoalError,
    StateLost,
    UnknownShard,
    WrongEpoch,
)
from shoal_proto.routes import Route
from shoal_proto.v1.parameters_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Shard, ShardMap
from shoal_server.core.processes import Holder
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import assignments as records
from shoal_server.etcd.records import shard_map
from shoal_server.parameters.shard.dense import is_dense
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.sessions import MAX_SESSIONS

log = structlog.get_logger(__name__)

LED_WITHIN_S = 1.0
"""Longest wait of a call that arrives before this server knows that it is primary."""


class ShardLocations(Protocol):
    """Locations of all shards that this server knows."""

    def route(self, job: str, shard_id: int) -> Route | None:
        """Return the route to a shard's primary, or to the successor during a handover; None if
        unknown."""
        ...

    def next_address(self, job: str, shard_id: int) -> str:
        """Return the address of the shard's successor; empty if unknown."""
        ...

    def is_kept(self, job: str, shard_id: int) -> bool:
        """True if this server's journal may have the shard, and this server is not its primary
        now."""
        ...


class _UnknownLocations:
    def route(self, job: str, shard_id: int) -> Route | None:
        return None

    def next_address(self, job: str, shard_id: int) -> str:
        return ""

    def is_kept(self, job: str, shard_id: int) -> bool:
        return False


class Catalog:
    """All shards of a server. Lives on the event loop; shards' states may be used from any
    thread."""

    def __init__(
        self, store: KeyValueStore, me: Holder, *, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """`max_sessions`: bound for each shard."""
        self._store = store
        self._layouts = shard_map.ShardMapReader(store)
        self._max_sessions = max_sessions
        self._me = me
        self._shards: dict[str, dict[int, ShardReplica]] = {}
        self._changed = asyncio.Condition()
        self.whereabouts: ShardLocations = _UnknownLocations()

    async def layout(self, job: str) -> ShardMap | None:
        """Return the job's shard map as written, read-only: its primaries, epochs and addresses are
        those of the first placement. None if there is none. Raises what the store raises."""
        return await self._layouts.read(job)

    def find(self, job: str, shard_id: int) -> ShardReplica | None:
        return self._shards.get(job, {}).get(shard_id)

    async def look_up(
        self, job: str, wanted: Sequence[tuple[int, int]]
    ) -> list[ShardReplica | ShoalError]:
        """Return, for each (shard id, epoch), the shard if this server is its primary, or the error
        that explains its absence: WrongEpoch, ShardNotReady, StateLost or UnknownShard. Raises what
        the store raises.

        Waits for backups of an earlier epoch: during a handover, the old primary already redirects
        calls to this server.
        """
        await self._wait_led(job, wanted)
        results: list[ShardReplica | ShoalError] = []
        for shard_id, epoch in wanted:
            replica = self.find(job, shard_id)
            if replica is None or replica.role is not ReplicaRole.PRIMARY:
                results.append(
                    self.redirect(job, shard_id, epoch) or await self._explain(job, shard_id)
                )
            elif replica.epoch != epoch or replica.is_handing_over:
                results.append(self.redirect(job, shard_id, epoch) or _wrong_epoch(replica, epoch))
            elif replica.is_forming:
                results.append(_not_ready(job, shard_id, "a backup that has its values"))
            else:
                results.append(replica)
        return results

    async def _wait_led(self, job: str, wanted: Sequence[tuple[int, int]]) -> None:
        def is_expected(shard_id: int, epoch: int) -> bool:
            replica = self.find(job, shard_id)
            return (
                replica is not None and replica.role is ReplicaRole.BACKUP and replica.epoch < epoch
            )

        def none_expected() -> bool:
            return not any(is_expected(*each) for each in wanted)

        if none_expected():
            return
        try:
            async with asyncio.timeout(LED_WITHIN_S), self._changed:
                await self._changed.wait_for(none_expected)
        except TimeoutError:
            return

    def redirect(self, job: str, shard_id: int, epoch: int) -> WrongEpoch | None:
        """Return the error, with a route, for a call with that epoch; None if this server knows of
        no later epoch."""
        route = self.whereabouts.route(job, shard_id)
        if route is None or route.epoch <= epoch:
            return None
        return WrongEpoch(
            f"this server is not the primary of shard {shard_id} of job {job} in epoch {epoch}",
            seen=f"epoch {epoch} at server {self._me.server_id}",
            expected=f"epoch {route.epoch} at server {route.server_id}",
            fix=f"Retry at {route.address}, or fetch the shard map.",
            details=routes.as_details([route]),
        )

    def with_route(self, error: ShoalError, job: str, shard_id: int, epoch: int) -> ShoalError:
        """Return the shard's `redirect`, if any, instead of a WrongEpoch without details."""
        if not isinstance(error, WrongEpoch) or error.details:
            return error
        return self.redirect(job, shard_id, epoch) or error

    async def wait_for(self, job: str, shard_ids: Iterable[int], wait_s: float) -> None:
        """Return once this server is the primary of all these shards and none is forming, or after
        `wait_s`. Other servers' shards do not count."""
        wanted = list(shard_ids)

        def is_settled(shard_id: int) -> bool:
            route = self.whereabouts.route(job, shard_id)
            if route is not None and route.server_id != self._me.server_id:
                return True
            replica = self.find(job, shard_id)
            return (
                replica is not None
                and replica.role is ReplicaRole.PRIMARY
                and not replica.is_forming
            )

        def all_settled() -> bool:
            return all(map(is_settled, wanted))

        if wait_s <= 0 or all_settled():
            return
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(all_settled)
        except TimeoutError:
            return

    async def check_creatable(
        self, job: str, shards: Sequence[Shard], optimizer: OptimizerSpec
    ) -> None:
        """Check that the job has these shards with equal dtype, group and blocks, and that existing
        shards have an equal optimizer. Raises UnknownShard, DtypeMismatch, ShapeMismatch,
        ProposalConflict, and what `check_new` and the store raise."""
        record = await self.layout(job)
        wanted = [shard.shard_id for shard in shards]
        assignments = await records.read_shards(self._store, job, wanted)
        mapped = {shard.shard_id: shard for shard in record.shards} if record else {}
        for shard in shards:
            expected, assignment = mapped.get(shard.shard_id), assignments.get(shard.shard_id)
            if expected is None or assignment is None:
                raise _unknown(job, shard.shard_id, record)
            self.check_new(job, shard, assignment)
            self._compare(shard, expected)
            replica = self.find(job, shard.shard_id)
            if replica is None or not is_dense(replica.state):
                continue
            known = replica.state.body.optimizer_spec
            if known != optimizer:
                raise ProposalConflict(
                    f"shard {shard.shard_id} of job {job} has another optimizer",
                    seen=_one_line(optimizer),
                    expected=_one_line(known),
                    fix="Give every worker the same optimizer and hyper-parameters.",
                )

    def check_new(self, job: str, shard: Shard, assignment: ShardAssignment | None) -> None:
        """Raise an error unless this server has the shard or may create it: WrongEpoch for another
        assignment; ShardNotReady or StateLost if the absent shard had values, or is to get them
        from a snapshot."""
        if assignment is None or assignment.primary != self._me or shard.epoch != assignment.epoch:
            raise WrongEpoch(
                f"shard {shard.shard_id} has another assignment",
                seen=f"epoch {shard.epoch} at server {self._me.server_id}",
                expected=f"epoch {assignment.epoch} at server {assignment.primary.server_id}"
                if assignment is not None
                else "no server: the record does not have the shard",
                fix="Fetch the shard map and retry.",
            )
        is_new = assignment.content is ShardContent.NONE
        if not is_new and self.find(job, shard.shard_id) is None:
            raise self.absence_error(job, assignment)

    def absence_error(self, job: str, assignment: ShardAssignment) -> ShoalError:
        """Return the error for a primary without a copy."""
        is_kept = self.whereabouts.is_kept(job, assignment.shard_id)
        return _absence_error(job, assignment, is_kept=is_kept)

    def _compare(self, shard: Shard, expected: Shard) -> None:
        if shard.dtype != expected.dtype:
            raise DtypeMismatch(
                f"shard {shard.shard_id} has another dtype",
                seen=shard.dtype,
                expected=expected.dtype,
            )
        if shard.group != expected.group or list(shard.blocks) != list(expected.blocks):
            raise ShapeMismatch(
                f"shard {shard.shard_id} is cut differently",
                seen=f"{len(shard.blocks)} blocks in group {shard.group}",
                expected=f"the {len(expected.blocks)} blocks of the job's shard map"
                f" in group {expected.group}",
                fix="Fetch the shard map and create from it.",
            )

    def add(self, replica: ShardReplica) -> bool:
        """Add a shard unless the catalog has it; True if it was added. Call `notify` afterwards."""
        shards = self._shards.setdefault(replica.job, {})
        if replica.shard_id in shards:
            return False
        replica.state.sessions.max_sessions = self._max_sessions
        shards[replica.shard_id] = replica
        return True

    def remove(self, replica: ShardReplica) -> None:
        """Remove a replica unless another has replaced it."""
        if self.find(replica.job, replica.shard_id) is replica:
            del self._shards[replica.job][replica.shard_id]

    async def notify(self) -> None:
        """Wake the calls that wait for shards."""
        async with self._changed:
            self._changed.notify_all()

    def of_job(self, job: str) -> list[ShardReplica]:
        return list(self._shards.get(job, {}).values())

    def shards(self, job: str = "") -> Iterator[ShardReplica]:
        """Yield the shards of one job, or of all jobs if `job` is empty, in order."""
        for name in sorted(self._shards):
            if job in ("", name):
                for shard_id in sorted(self._shards[name]):
                    yield self._shards[name][shard_id]

    async def _explain(self, job: str, shard_id: int) -> ShoalError:
        assignment = (await records.read_shards(self._store, job, [shard_id])).get(shard_id)
        if assignment is None:
            return _unknown(job, shard_id, await self.layout(job))
        if assignment.primary == self._me:
            if self.find(job, shard_id) is not None:
                return _not_ready(job, shard_id, "this server, which is about to be its primary")
            return self.absence_error(job, assignment)
        return WrongEpoch(
            f"shard {shard_id} of job {job} is not here",
            seen=f"server {self._me.server_id}",
            expected=f"server {assignment.primary.server_id}, epoch {assignment.epoch}",
            fix="Fetch the shard map and retry.",
        )


def _wrong_epoch(replica: ShardReplica, epoch: int) -> WrongEpoch:
    return WrongEpoch(
        f"shard {replica.shard_id} has another epoch",
        seen=str(epoch),
        expected=f"{replica.epoch + 1}, soon" if replica.is_handing_over else str(replica.epoch),
        fix="Fetch the shard map and retry.",
    )


def _unknown(job: str, shard_id: int, record: ShardMap | None) -> UnknownShard:
    return UnknownShard(
        f"there is no shard {shard_id} in job {job}",
        seen=f"shard {shard_id}",
        expected=f"one of {len(record.shards)} shards" if record else "a job with a shard map",
        fix="Fetch the shard map.",
    )


def _one_line(spec: OptimizerSpec) -> str:
    return " ".join(str(spec).split())


def _absence_error(job: str, assignment: ShardAssignment, *, is_kept: bool) -> ShoalError:
    """Return StateLost if the shard had values, and no backup or journal is known to have the
    newest version; else ShardNotReady. `is_kept`: the primary's journal has the shard, in whatever
    version."""
    if assignment.content is ShardContent.NONE:
        return _not_ready(job, assignment.shard_id, "a worker that creates it")
    if assignment.content is ShardContent.LOADING:
        return _not_ready(job, assignment.shard_id, "a snapshot that is being restored")
    if is_kept and not assignment.found_version:
        server_id = assignment.primary.server_id
        expected = f"server {server_id}, which reads it from its journal once it is known that no"
        return _not_ready(job, assignment.shard_id, f"{expected} other process has a later version")
    if assignment.backups:
        backups = ", ".join(backup.server_id for backup in assignment.backups)
        return _not_ready(job, assignment.shard_id, f"one of its backups, {backups}, as primary")
    return _lost(job, assignment)


def _not_ready(job: str, shard_id: int, expected: str) -> ShardNotReady:
    return ShardNotReady(f"shard {shard_id} of job {job} has no values yet", expected=expected)


def _lost(job: str, assignment: ShardAssignment) -> StateLost:
    why = losses.explained(job, assignment)
    return StateLost(
        why.what, seen=why.seen, expected=why.expected, fix=why.fix, details=why.details
    )
