"""The ShardSnapshots service: writes this server's shards to a snapshot's files, and loads them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import structlog

from shoal_proto.errors import InvalidSpec, MalformedMessage, SnapshotDamaged, WrongEpoch
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1 import snapshots_pb2 as pb
from shoal_proto.v1.snapshots_pb2_grpc import ShardSnapshotsServicer
from shoal_proto.v1.weights_pb2 import PutSegmentRequest
from shoal_server.parameters.images.image import Stamp
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard import image_file
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.memory import Memory, MemoryClaim
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers
from shoal_server.parameters.tables import restore
from shoal_server.parameters.weights.cut_segments import planned
from shoal_server.parameters.weights.servicer import WeightsServicer
from shoal_server.serving.locations import AllowedRoots
from shoal_server.serving.rpc import Context
from shoal_server.snapshots import messages
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import ManifestEntry, part_file
from shoal_server.snapshots.storage import open_below

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_LIMIT_S = 60.0
WRITE_WITHIN_S = 30.0
"""Longest time between the cut and the call that writes or publishes it."""
FORMING_S = 10.0
"""Longest wait of `Load` for backups."""


class SnapshotsServicer(ShardSnapshotsServicer):
    """Serves snapshots. `pool` reads and writes storage, so that slow storage delays no work on
    shards."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        replicas: ShardReplicas,
        barriers: SnapshotBarriers,
        maker: TableMaker,
        memory: Memory,
        pool: Executor,
        weights: WeightsServicer,
        read_roots: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        self._catalog = catalog
        self._replicas = replicas
        self._barriers = barriers
        self._maker = maker
        self._memory = memory
        self._pool = pool
        self._weights = weights
        self._read_roots = read_roots

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseReply:
        if not 0 < request.limit_s <= MAX_LIMIT_S:
            raise InvalidSpec(
                "the limit of a cut is out of range",
                seen=f"{request.limit_s:g} s",
                expected=f"above 0, at most {MAX_LIMIT_S:g} s",
            )
        await self._maker.make_all(request.job)
        begun = await self._barriers.close(request.job, request.cut_id, request.limit_s)
        return pb.CloseReply(begun=messages.encode_begun(begun))

    async def Freeze(self, request: pb.FreezeRequest, context: Context) -> pb.FreezeReply:
        stamps, torn = await self._barriers.freeze(
            request.job,
            request.cut_id,
            messages.decode_begun(request.begun),
            min(request.wait_s, MAX_LIMIT_S),
            take_torn=request.take_torn,
        )
        known = [Stamp(each.shard_id, each.epoch, each.version) for each in request.known]
        self._barriers.drop_unwanted(request.job, request.cut_id, known, WRITE_WITHIN_S)
        return pb.FreezeReply(
            shards=[
                pb.ShardStamp(shard_id=s.shard_id, epoch=s.epoch, version=s.version) for s in stamps
            ],
            torn=messages.encode_begun(dict.fromkeys(torn)),
        )

    async def Write(self, request: pb.WriteRequest, context: Context) -> pb.WriteReply:
        try:
            _check_cut(request)
            library = await self._library(request.url, request.job)
            files = []
            for image in self._barriers.images_of_cut(request.job, request.cut_id):
                part = await self._in_pool(partial(_write, library, request, image))
                files.append(messages.encode_entry(part))
            return pb.WriteReply(files=files)
        finally:
            self._barriers.abort(request.job, request.cut_id, "the call that writes the cut ended")

    async def Publish(self, request: pb.PublishCutRequest, context: Context) -> pb.PublishCutReply:
        put = PutSegmentRequest(
            series=request.series,
            epoch=request.epoch,
            publication=request.publication,
            chain=request.chain,
        )
        try:
            segments = []
            for image in self._barriers.images_of_cut(request.job, request.cut_id):
                # Parts of a publication are numbered by rank; rank 0 is the publisher's own part.
                put.rank = image.shard_id + 1
                segments.append(await self._weights.keep_cut(put, planned(image)))
            return pb.PublishCutReply(segments=segments)
        finally:
            self._barriers.abort(
                request.job, request.cut_id, "the call that publishes the cut ended"
            )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        self._barriers.abort(request.job, request.cut_id, "the coordinator gave the cut up")
        return pb.AbortReply()

    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadReply:
        job = request.job
        parts = [messages.decode_entry(file) for file in request.files]
        # The coordinator has written the record before this call.
        await self._replicas.drop_stale_replicas(job)
        epochs = {part.shard_id: self._epoch_to_lead(job, part.shard_id) for part in parts}
        library = await self._library(request.url, job)
        with self._claim(job, parts) as claim:
            for part in parts:
                before_bytes = self._bytes_of(job, part)
                state = await self._in_pool(partial(read_shard, library, part))
                self._lead(job, state, epochs[part.shard_id])
                claim.move_to_shard(part.num_bytes - before_bytes)
        await self._catalog.notify()
        await self._catalog.wait_for(job, epochs, FORMING_S)
        log.info("shards_loaded", job=job, num_shards=len(parts), url=request.url)
        return pb.LoadReply(shard_ids=sorted(epochs))

    def _claim(self, job: str, parts: Sequence[ManifestEntry]) -> MemoryClaim:
        num_bytes = sum(part.num_bytes - self._bytes_of(job, part) for part in parts)
        return self._memory.reserve(num_bytes, f"{len(parts)} shards of a snapshot of job {job}")

    def _bytes_of(self, job: str, part: ManifestEntry) -> int:
        replica = self._catalog.find(job, part.shard_id)
        return 0 if replica is None else replica.state.memory_bytes

    def _epoch_to_lead(self, job: str, shard_id: int) -> int:
        assignment = self._replicas.assignment(job, shard_id)
        me = self._replicas.me
        if assignment is None or assignment.primary != me:
            raise WrongEpoch(
                f"this server is to load shard {shard_id} of job {job}, and does not lead it",
                seen=f"server {me.server_id}",
                expected="no server: the job's record does not have the shard"
                if assignment is None
                else f"server {assignment.primary.server_id}",
                fix="Restore again.",
            )
        return assignment.epoch

    def _lead(self, job: str, state: AnyShard, epoch: int) -> None:
        """A member may have created the shard meanwhile: replace it."""
        if self._epoch_to_lead(job, state.shard_id) != epoch:
            raise WrongEpoch(
                f"shard {state.shard_id} of job {job} has another epoch now", seen=str(epoch)
            )
        state.enter_epoch(epoch)
        self._replicas.replace(ShardReplica(job, state, ReplicaRole.PRIMARY, epoch))

    async def _library(self, url: str, job: str) -> SnapshotLibrary:
        roots = AllowedRoots(await self._read_roots())
        return await self._in_pool(lambda: SnapshotLibrary(open_below(roots, url), job))

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _check_cut(request: pb.WriteRequest) -> None:
    """The cut's id and number become part of a path."""
    if not is_name(request.cut_id) or not 0 < request.number < 2**63:
        raise InvalidSpec(
            "bad cut or number of a snapshot",
            seen=f"{request.cut_id!r}, number {request.number}",
            expected=f"{NAME_RULE}, and a number above 0",
        )


def _write(library: SnapshotLibrary, request: pb.WriteRequest, image: ShardImage) -> ManifestEntry:
    path = part_file(request.number, request.cut_id, image.shard_id)
    folder, _, name = path.rpartition("/")
    file = image_file.DigestingReader(image_file.pieces(image))
    library.storage.write_pieces(f"{request.job}/{folder}", lambda: name, file)
    # Close the image off the event loop: freeing much memory takes a while.
    image.close()
    return ManifestEntry(
        shard_id=image.shard_id,
        epoch=image.stamp.epoch,
        version=image.version,
        kind=image.kind,
        file=path,
        num_bytes=file.num_bytes,
        sha256=file.sha256,
    )


def read_shard(library: SnapshotLibrary, part: ManifestEntry) -> AnyShard:
    """Read a shard from a snapshot. Raises SnapshotDamaged, and what the storage raises."""
    data = library.read_part(part)
    image = image_file.from_bytes(data, sha256=part.sha256, file=part.file, shard_id=part.shard_id)
    try:
        return restore.restore(image)
    except MalformedMessage as error:
        raise SnapshotDamaged(
            f"the file {part.file} of shard {part.shard_id} holds no shard",
            seen=error.seen,
            expected="tensors and metadata that fit together",
            fix="Restore another snapshot.",
            details={"file": part.file, "shard": str(part.shard_id)},
        ) from error
