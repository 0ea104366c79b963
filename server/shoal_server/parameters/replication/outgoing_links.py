"""Links that this server opens, and the images that it sends over them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import structlog

from shoal_proto.errors import InternalError, ShoalError
from shoal_proto.pieces import Buffer
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import (
    CloseImage,
    CloseLink,
    MakeImage,
    OpenLink,
    ReleaseChunks,
    SendRequest,
)
from shoal_server.core.replication.protocol.events import (
    ImageMade,
    ImageNotMade,
    LinkBroken,
    LinkOpened,
    RecordDelivered,
    ReplyReceived,
)
from shoal_server.core.replication.protocol.messages import ImageChunk
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.comparison.digest import PieceDigest
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.outgoing_record import OutgoingRecord
from shoal_server.parameters.replication.peer_link import PeerLink
from shoal_server.parameters.replication.throttle import LARGE, run_throttled
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.workers import Runner
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _OutgoingImage:
    image: ShardImage | None = None
    released: int = 0


class OutgoingLinks:
    """Opens links and makes images for the core of server `me`."""

    def __init__(
        self,
        driver: CoreDriver,
        *,
        me: Holder,
        catalog: Catalog,
        directory: ServerDirectory,
        run: Runner,
        timeouts: PeerTimeouts,
    ) -> None:
        self._driver = driver
        self._me = me
        self._catalog = catalog
        self._directory = directory
        self._run = run
        self._timeouts = timeouts
        self._links: dict[tuple[Holder, int], PeerLink] = {}
        self._images: dict[int, _OutgoingImage] = {}
        self._tasks = SupervisedTasks()

    async def close(self) -> None:
        await self._tasks.close()
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()
        for image in list(self._images):
            self.close_image(CloseImage(image))

    # --- links ---

    def open_link(self, effect: OpenLink) -> None:
        link = PeerLink(self._me, effect.peer, effect.link, self, self._timeouts)
        self._links[effect.peer, effect.link] = link
        link.start()

    def close_link(self, effect: CloseLink) -> None:
        link = self._links.pop((effect.peer, effect.link), None)
        if link is not None:
            self._tasks.start(link.close())

    def send_request(self, effect: SendRequest) -> None:
        link = self._links.get((effect.peer, effect.link))
        if link is None:
            return
        if effect.record is None:
            link.send(effect.request)
        else:
            assert isinstance(effect.record, OutgoingRecord)
            link.send_record(effect.request, effect.record)

    def compare(self, replica: ShardReplica, digest: PieceDigest) -> None:
        """Send a digest to the servers that get the shard's pushes, unless the shard has a later
        version."""
        # The record of the digest's version goes first.
        replica.leading.report_applied()
        if not replica.is_led or replica.state.version != digest.version:
            return
        message = frames.of_digest((replica.job, replica.shard_id), replica.epoch, digest)
        for link in self._followed_by(replica):
            link.compare(message)

    def draft(self, replica: ShardReplica, data: memoryview) -> memoryview | None:
        """Copy a push's data, before it is applied, to memory shared with a follower; None if no
        follower has such memory now. See `PeerLink.draft`."""
        for link in self._followed_by(replica):
            if (drafted := link.draft(data)) is not None:
                return drafted
        return None

    def _followed_by(self, replica: ShardReplica) -> Iterator[PeerLink]:
        for peer_and_number in replica.links:
            # A link may have ended before the core has handled that.
            if (link := self._links.get(peer_and_number)) is not None:
                yield link

    # --- called by links: see `LinkOwner` ---

    async def find_address(self, holder: Holder) -> str | None:
        return await self._directory.find_address(holder)

    def header(self, image: int) -> pb.CutHeader | None:
        kept = self._images.get(image)
        return kept.image.header if kept is not None and kept.image is not None else None

    async def chunk(self, request: ImageChunk) -> Buffer:
        kept = self._images.get(request.image)
        if kept is None or kept.image is None:
            raise InternalError(
                "an image was closed before all of it was sent", seen=f"image {request.image}"
            )
        return await run_throttled(self._run, partial(kept.image.chunk, request.index))

    def submit_event(
        self, event: LinkOpened | LinkBroken | RecordDelivered | ReplyReceived
    ) -> None:
        if isinstance(event, LinkBroken):
            self._links.pop((event.peer, event.link), None)
        self._driver.submit_event(event)

    # --- images ---

    def make_image(self, effect: MakeImage) -> None:
        self._images[effect.image] = _OutgoingImage()
        self._tasks.start(self._make(effect))

    async def _make(self, effect: MakeImage) -> None:
        replica = self._catalog.find(*effect.key)
        try:
            if replica is None:
                raise InternalError("the shard is no longer on this server", seen=str(effect.key))
            image = await replica.run_in_order(self._run, LARGE, replica.image)
        except Exception as error:
            # Any error is reported, even a lack of memory: other images for the server wait for
            # this one.
            if not isinstance(error, ShoalError):
                log.exception("image_not_cut", job=effect.key[0], shard_id=effect.key[1])
            self._images.pop(effect.image, None)
            self._driver.submit_event(
                ImageNotMade(effect.key, effect.image, str(error) or repr(error))
            )
            return
        kept = self._images.get(effect.image)
        if kept is None:
            image.close()
            return
        kept.image = image
        self._driver.submit_event(
            ImageMade(effect.key, effect.image, image.version, image.num_chunks)
        )

    def release_chunks(self, effect: ReleaseChunks) -> None:
        kept = self._images.get(effect.image)
        if kept is not None and kept.image is not None:
            for index in range(kept.released, effect.next_chunk):
                kept.image.release(index)
            kept.released = max(kept.released, effect.next_chunk)

    def close_image(self, effect: CloseImage) -> None:
        kept = self._images.pop(effect.image, None)
        if kept is not None and kept.image is not None:
            # Close the image in a thread: freeing much memory takes a while.
            asyncio.get_running_loop().run_in_executor(None, kept.image.close)
