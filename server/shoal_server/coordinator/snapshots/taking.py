"""Taking a snapshot: one cut over all primaries of a job's shards, then their files.

    Close    every server admits only pushes that have begun there, and reports which these are
    cursor   the sample ledger is read: samples that it counts are in the cut, since members
             report samples as completed after their push is acknowledged
    Freeze   every server admits pushes that have begun anywhere, freezes its shards, and then
             admits all pushes again
    Write    every server writes its frozen shards, except unchanged ones
    commit   the manifest is written last

If a primary is not registered, or Close or Freeze raises a RetryError, another cut is tried, up to
three in all. After any other failure, every server admits all pushes again, at the latest after its
own time limit, and the snapshot's files are removed.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import structlog

from shoal_proto.errors import InvalidSpec, RetryError, ShoalError, SnapshotFailed, StateLost
from shoal_proto.v1 import snapshots_pb2 as pb
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.coordinator.plug_in.interface import PublishedCut
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.core.publications.limits import MAX_WORLD
from shoal_server.core.shards import losses
from shoal_server.core.shards.steps import Shards, StepId, merged
from shoal_server.etcd import keys
from shoal_server.etcd.api import Get, Put, absent, created_at
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments, shard_map
from shoal_server.serving.tasks import gather_settled
from shoal_server.serving.threads import to_thread_uncancelled
from shoal_server.snapshots import messages
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest, ManifestEntry

log = structlog.get_logger(__name__)

ANSWER_WITHIN_S = 2.0
WAITS_S = (1.0, 2.0, 4.0)
"""Time for pushes in progress to end, by attempt."""
PAUSE_S = 0.5
WRITE_WITHIN_S = 3600.0
PUBLISH_WITHIN_S = 600.0
"""Time that a publisher has for its part. Its call is cancelled when it gives up earlier."""


@dataclass(frozen=True, kw_only=True)
class JobPosition:
    """State of a job that the coordinator adds to a snapshot."""

    cursor: Callable[[str], Awaitable[Mapping[str, Any] | None]]
    """Returns a job's current sample ledger; None without one."""
    training: Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TakenSnapshot:
    manifest: Manifest
    pause_s: float
    """Time from the first Close to the last answer of Freeze, for which new pushes waited."""


@dataclass(frozen=True, kw_only=True)
class _Cut:
    cut_id: str
    number: int
    """Number of the snapshot; 0 for published weights."""
    lineage: str
    layout: ShardMap
    epochs: Mapping[int, int]
    """Epochs of the shards, by id: a primary that froze an earlier epoch has been replaced."""
    addresses: Mapping[str, str]
    """Servers' addresses by id."""
    known: Mapping[tuple[int, int, int], ManifestEntry]
    """Entries of the previous snapshot, by shard, epoch and version."""


@dataclass(frozen=True, kw_only=True)
class _Frozen:
    stamps: Mapping[str, Sequence[pb.ShardStamp]]
    begun: Mapping[StepId, Shards]
    torn: Sequence[str]
    cursor: Mapping[str, Any] | None
    pause_s: float


class SnapshotTaker:
    """Takes snapshots and cuts, one at a time for each job, on one event loop."""

    def __init__(
        self,
        store: LeaderStore,
        calls: ServerCalls,
        state: JobPosition,
        on_taken: Callable[[TakenSnapshot], None] = lambda taken: None,
    ) -> None:
        self._store = store
        self._calls = calls
        self._state = state
        self._on_taken = on_taken
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def take(
        self, library: SnapshotLibrary, *, only_if_changed: bool = False
    ) -> TakenSnapshot:
        """Take a snapshot. `only_if_changed`: return the newest one if no shard has changed since.

        Raises SnapshotFailed, StateLost, and what the store, the storage and the servers raise; the
        snapshot's files are then removed.
        """
        job = library.job
        async with self._locks.setdefault(job, asyncio.Lock()):
            before = await asyncio.to_thread(library.newest)
            number = await asyncio.to_thread(library.next_number)
            cut, frozen = await self._frozen(job, before, number)
            committed = threading.Event()
            try:
                parts = await self._written(job, library.storage.url, cut, frozen)
                if only_if_changed and before is not None and parts == tuple(before.parts):
                    return TakenSnapshot(manifest=before, pause_s=frozen.pause_s)
                manifest = self._manifest(job, cut, frozen, parts)

                def commit() -> None:
                    library.commit(manifest)
                    committed.set()

                await to_thread_uncancelled(commit)
            except BaseException:
                if not committed.is_set():
                    await self._undo(library, cut)
                raise
        log.info(
            "snapshot_taken",
            job=job,
            number=manifest.number,
            num_bytes=manifest.num_bytes,
            num_new_bytes=manifest.num_new_bytes,
            pause_s=round(frozen.pause_s, 4),
            num_partial_steps=len(manifest.partial_steps),
        )
        taken = TakenSnapshot(manifest=manifest, pause_s=frozen.pause_s)
        self._on_taken(taken)
        return taken

    async def publish(
        self, job: str, request_to: Callable[[str], pb.PublishCutRequest]
    ) -> PublishedCut:
        """Take a cut, which the servers keep as segments of published weights.

        `request_to` returns the request for a server id. Raises InvalidSpec for more shards than a
        version can have, SnapshotFailed, StateLost, and what the store and the servers raise.
        """
        async with self._locks.setdefault(job, asyncio.Lock()):
            _check_publishable(job, await shard_map.read(self._store, job))
            cut, frozen = await self._frozen(job, None, 0)
            requests = {server: request_to(server) for server in cut.addresses}
            for request in requests.values():
                request.job, request.cut_id = job, cut.cut_id
            try:
                replies = await gather_settled(
                    *(
                        self._calls.call(
                            cut.addresses[server],
                            lambda stub: stub.Publish,
                            request,
                            PUBLISH_WITHIN_S,
                        )
                        for server, request in requests.items()
                    )
                )
            except BaseException:
                await self._abort(job, cut)
                raise
        segments = sorted((s for r in replies for s in r.segments), key=lambda s: s.shard_id)
        stamps = sorted((s for r in frozen.stamps.values() for s in r), key=lambda s: s.shard_id)
        if [each.shard_id for each in segments] != [each.shard_id for each in stamps]:
            raise SnapshotFailed(
                f"not every shard of job {job} was kept as a segment",
                seen=f"{len(segments)} segments",
                expected=f"{len(stamps)}, one for each shard",
            )
        return PublishedCut(
            segments=segments,
            layout=cut.layout,
            stamps=stamps,
            torn=frozen.torn,
            pause_s=frozen.pause_s,
        )

    async def _lineage(self, job: str) -> str:
        """Return the lineage of the job's shards: a random text, drawn at their first cut and at
        each restore. Raises SnapshotFailed, and draws none, if the job has no shards."""
        key = keys.lineage(job)
        placed = await self._store.get(keys.assignments_head(job))
        if placed is None:
            raise no_shards_error(job)
        drawn = Put(key, secrets.token_hex(8).encode())
        # A job that is removed meanwhile must not leave a key.
        is_new = [absent(key), created_at(placed.key, placed.create_revision)]
        result = await self._store.transact(is_new, [drawn], [Get(key)])
        if result.succeeded:
            return drawn.value.decode()
        if not result.reads[0]:
            raise no_shards_error(job)
        return result.reads[0][0].value.decode()

    async def current_lineage(self, job: str) -> str | None:
        """Lineage of the snapshots of the job's present shards; None before the first cut."""
        stored = await self._store.get(keys.lineage(job))
        return None if stored is None else stored.value.decode()

    async def _planned(self, job: str, before: Manifest | None, number: int) -> _Cut:
        # Before the assignments: `_check_lineage` then notices a restore in between.
        lineage = await self._lineage(job)
        layout = await shard_map.read(self._store, job)
        entry = await assignments.read(self._store, job)
        if layout is None or entry is None:
            raise no_shards_error(job)
        for gone in losses.lost(entry.assignments):
            why = losses.explained(job, gone)
            raise StateLost(
                why.what, seen=why.seen, expected=why.expected, fix=why.fix, details=why.details
            )
        present = await shard_map.servers(self._store)
        addresses = {}
        for assignment in entry.assignments.shards:
            primary = assignment.primary
            if primary not in present:
                raise SnapshotFailed(
                    f"the primary of shard {assignment.shard_id} of job {job} is not registered",
                    seen=primary.server_id,
                    expected="a registered server",
                    fix="Wait until another server has taken over.",
                )
            addresses[primary.server_id] = present[primary]
        reusable = before.parts if before is not None and before.lineage == lineage else ()
        return _Cut(
            cut_id=secrets.token_hex(6),
            number=number,
            lineage=lineage,
            layout=layout,
            epochs={each.shard_id: each.epoch for each in entry.assignments.shards},
            addresses=addresses,
            known={(part.shard_id, part.epoch, part.version): part for part in reusable},
        )

    async def _frozen(self, job: str, before: Manifest | None, number: int) -> tuple[_Cut, _Frozen]:
        """Make a cut, in up to three attempts: shards may move and servers may die. The last
        attempt accepts incomplete pushes."""
        for attempt, wait_s in enumerate(WAITS_S, 1):
            is_last = attempt == len(WAITS_S)
            cut: _Cut | None = None
            try:
                cut = await self._planned(job, before, number)
                return cut, await self._freeze(job, cut, wait_s, take_torn=is_last)
            except BaseException as error:
                if cut is not None:
                    await self._abort(job, cut)
                if is_last or not isinstance(error, RetryError):
                    raise
                cut_id = cut.cut_id if cut is not None else ""
                log.info("cut_failed", job=job, cut=cut_id, reason=str(error))
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    async def _freeze(self, job: str, cut: _Cut, wait_s: float, *, take_torn: bool) -> _Frozen:
        started_s = time.monotonic()
        close = pb.CloseRequest(job=job, cut_id=cut.cut_id, limit_s=2 * ANSWER_WITHIN_S)
        closed = await self._ask_all(cut, lambda stub: stub.Close, close, ANSWER_WITHIN_S)
        begun = merged(messages.decode_begun(reply.begun) for reply in closed.values())
        cursor = await self._state.cursor(job)
        freeze = pb.FreezeRequest(
            job=job,
            cut_id=cut.cut_id,
            begun=messages.encode_begun(begun),
            wait_s=wait_s,
            take_torn=take_torn,
            known=[
                pb.ShardStamp(shard_id=shard_id, epoch=epoch, version=version)
                for shard_id, epoch, version in cut.known
            ],
        )
        limit_s = wait_s + ANSWER_WITHIN_S
        frozen = await self._ask_all(cut, lambda stub: stub.Freeze, freeze, limit_s)
        pause_s = time.monotonic() - started_s
        stamps = {server: reply.shards for server, reply in frozen.items()}
        _check_complete(cut, stamps)
        await self._check_lineage(job, cut)
        torn = [
            f"push {step.sequence} of {step.session} lacks parts at {server}"
            for server, reply in frozen.items()
            for step in sorted(messages.decode_begun(reply.torn))
        ]
        return _Frozen(stamps=stamps, begun=begun, torn=torn, cursor=cursor, pause_s=pause_s)

    async def _check_lineage(self, job: str, cut: _Cut) -> None:
        """Raise SnapshotFailed if the job was restored since the cut was planned: some servers may
        have frozen the shards from before."""
        lineage = await self.current_lineage(job)
        if lineage != cut.lineage:
            raise SnapshotFailed(
                f"job {job} was restored during the cut",
                seen=f"lineage {lineage or 'none'}",
                expected=f"lineage {cut.lineage}, as when the cut began",
                fix="Take another snapshot.",
            )

    async def _written(
        self, job: str, url: str, cut: _Cut, frozen: _Frozen
    ) -> Sequence[ManifestEntry]:
        write = pb.WriteRequest(job=job, cut_id=cut.cut_id, url=url, number=cut.number)
        replies = await self._ask_all(cut, lambda stub: stub.Write, write, WRITE_WITHIN_S)
        written = {
            part.shard_id: part
            for reply in replies.values()
            for part in map(messages.decode_entry, reply.files)
        }
        parts = []
        for stamps in frozen.stamps.values():
            for stamp in stamps:
                key = (stamp.shard_id, stamp.epoch, stamp.version)
                part = cut.known.get(key) or written.get(stamp.shard_id)
                if part is None or (part.epoch, part.version) != key[1:]:
                    raise SnapshotFailed(
                        f"shard {stamp.shard_id} was not written at the version of the cut",
                        seen="nothing" if part is None else f"version {part.version}",
                        expected=f"version {stamp.version} of epoch {stamp.epoch}",
                    )
                parts.append(part)
        return tuple(sorted(parts, key=lambda part: part.shard_id))

    def _manifest(
        self, job: str, cut: _Cut, frozen: _Frozen, parts: Sequence[ManifestEntry]
    ) -> Manifest:
        return Manifest(
            job=job,
            number=cut.number,
            cut_id=cut.cut_id,
            lineage=cut.lineage,
            taken_unix_s=time.time(),
            layout=cut.layout.SerializeToString(deterministic=True),
            parts=parts,
            steps=messages.newest(frozen.begun),
            partial_steps=list(frozen.torn),
            cursor=frozen.cursor,
            training=self._state.training(job),
        )

    async def _undo(self, library: SnapshotLibrary, cut: _Cut) -> None:
        await self._abort(library.job, cut)
        try:
            await asyncio.to_thread(library.discard, cut.number, cut.cut_id)
        except ShoalError as error:
            # The files are removed after a later snapshot.
            log.warning("snapshot_not_removed", job=library.job, reason=str(error))

    async def _abort(self, job: str, cut: _Cut) -> None:
        abort = pb.AbortRequest(job=job, cut_id=cut.cut_id)
        try:
            await self._ask_all(cut, lambda stub: stub.Abort, abort, ANSWER_WITHIN_S)
        except ShoalError as error:
            # A server that was not reached admits pushes again after its time limit.
            log.info("cut_not_aborted", job=job, cut=cut.cut_id, reason=str(error))

    async def _ask_all(
        self, cut: _Cut, method: Callable[[Any], Any], request: Any, timeout_s: float
    ) -> dict[str, Any]:
        """Return the answers by server id; after all of them, raise the first failure."""
        replies = await gather_settled(
            *(
                self._calls.call(address, method, request, timeout_s)
                for address in cut.addresses.values()
            )
        )
        return dict(zip(cut.addresses, replies, strict=True))


def no_shards_error(job: str) -> SnapshotFailed:
    """Error of a snapshot of a job that has no parameters on the servers. `shoal.sbatch` knows it
    by its text."""
    return SnapshotFailed(
        f"job {job} has no shards",
        seen="no shard map",
        expected="a job that trains with parameter servers, and has not finished",
    )


def _check_publishable(job: str, layout: ShardMap | None) -> None:
    # One further segment of the version is the publisher's own part.
    if layout is not None and len(layout.shards) >= MAX_WORLD:
        raise InvalidSpec(
            f"job {job} has more shards than a published version can have",
            seen=f"{len(layout.shards)} shards",
            expected=f"fewer than {MAX_WORLD}, those of parameters and of tables together",
            fix="Create tables with a smaller num_shards, or publish without tables=True.",
        )


def _check_complete(cut: _Cut, stamps: Mapping[str, Sequence[pb.ShardStamp]]) -> None:
    layout = cut.layout
    taken = sorted(stamp.shard_id for each in stamps.values() for stamp in each)
    expected = sorted(shard.shard_id for shard in layout.shards)
    if taken != expected:
        missing = sorted(set(expected) - set(taken))
        raise SnapshotFailed(
            f"not every shard of job {layout.job} has exactly one primary",
            seen=f"{len(taken)} frozen, without {missing[:10]}" if missing else "some frozen twice",
            expected=f"{len(expected)} shards that have their values",
            fix="Wait until the members have created them, or until they have been moved.",
        )
    for server_id, each in stamps.items():
        for stamp in each:
            planned = cut.epochs.get(stamp.shard_id, 0)
            if stamp.epoch < planned:
                raise SnapshotFailed(
                    f"server {server_id} froze shard {stamp.shard_id} of job {layout.job} as of"
                    " before it was moved or restored",
                    seen=f"epoch {stamp.epoch}",
                    expected=f"epoch {planned} or later",
                    fix="Take another snapshot.",
                )
