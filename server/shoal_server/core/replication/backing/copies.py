"""Copies of shards led by other servers. Only the primary that the record names can begin one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import (
    AcceptRequest,
    AdoptImage,
    DropImage,
    DropShard,
    Effect,
    EnterEpoch,
    RefreshShardRecord,
    SendReply,
)
from shoal_server.core.replication.protocol.messages import (
    BackupRefusalReason,
    BackupRefused,
    BackupState,
    ChunkReceived,
    CopyUpToDate,
    Data,
    ImageChunk,
    ImageInstalled,
    ImageStart,
    Key,
    Offer,
    RecordsReceived,
    Reply,
    Request,
    UpdateMessage,
)
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent

Begins = CopyUpToDate | ImageStart


class CopyPhase(Enum):
    HELD = "the copy follows its primary"
    SETTLING = "received records are being applied: this server is to lead the shard, or led it"


@dataclass(slots=True)
class Copy:
    primary: Holder
    """The primary that began or last continued the copy."""
    epoch: int
    born: int
    """Epoch in which the shard got its first values."""
    received: int
    """Version up to which all records were received, applied or not."""
    content: ShardContent
    """Content in the record of that epoch."""
    phase: CopyPhase = CopyPhase.HELD

    def is_of_other_content(self, new: ShardAssignment) -> bool:
        """True if the shard was emptied, lost or restored since: the copy is then useless."""
        return self.content is ShardContent.PRESENT and new.content is not ShardContent.PRESENT


@dataclass(slots=True)
class IncomingImage:
    peer: Holder
    link: int
    start: ImageStart
    come: int = 0
    """Chunks received."""
    stored: int = 0
    """Chunks stored."""


@dataclass(slots=True)
class _PendingOffers:
    """Offers that wait because the last record read does not name the sender, or the copy is
    settling."""

    offers: list[tuple[Holder, int, Offer]] = field(default_factory=list)
    is_reading: bool = False


class Copies:
    def __init__(self, me: Holder, placement_ids: Mapping[Key, str]) -> None:
        self._me = me
        self._placement_ids = placement_ids
        self._held: dict[Key, Copy] = {}
        self._incoming: dict[Key, IncomingImage] = {}
        self._pending: dict[Key, _PendingOffers] = {}

    def find(self, key: Key) -> Copy | None:
        return self._held.get(key)

    def keys_from(self, primary: Holder) -> list[Key]:
        return [key for key, copy in self._held.items() if copy.primary == primary]

    def keep(self, key: Key, copy: Copy) -> None:
        self._held[key] = copy

    def pop(self, key: Key) -> Copy | None:
        return self._held.pop(key, None)

    def is_held(self, key: Key) -> bool:
        copy = self._held.get(key)
        return copy is not None and copy.phase is CopyPhase.HELD

    def drop(self, key: Key) -> Iterator[Effect]:
        if self._held.pop(key, None) is None:
            return
        yield DropShard(key)
        pending = self._pending.get(key)
        if pending is not None and not pending.is_reading:
            # Offers that waited for the copy can be answered now.
            pending.is_reading = True
            yield RefreshShardRecord(key)

    # --- requests of primaries ---

    def requested(
        self,
        peer: Holder,
        link: int,
        request: Request,
        data: Data,
        assignment: ShardAssignment | None,
    ) -> Iterator[Effect]:
        match request:
            case UpdateMessage():
                yield from self._record(peer, link, request, data, assignment)
            case ImageChunk():
                yield from self._chunk(peer, link, request, data)
            case Offer():
                yield from self._offered(peer, link, request, assignment)
            case CopyUpToDate() | ImageStart():
                if not self._is_sent_by_primary(assignment, peer, request):
                    yield SendReply(peer, link, self._other_holders(request, assignment))
                elif isinstance(request, ImageStart):
                    yield from self._image(peer, link, request, data)
                else:
                    yield from self._continued(peer, link, request, assignment)

    def _is_sent_by_primary(
        self,
        assignment: ShardAssignment | None,
        peer: Holder,
        message: Offer | UpdateMessage | Begins,
    ) -> bool:
        # An update has no `placement_id`: the copy was checked when it began.
        placement_id = "" if isinstance(message, UpdateMessage) else message.placement_id
        return (
            assignment is not None
            and (assignment.primary, assignment.epoch) == (peer, message.epoch)
            and placement_id in ("", self._placement_ids.get(message.key))
            and self._me in assignment.holders[1:]
        )

    def _other_holders(
        self, message: Offer | UpdateMessage | Begins, assignment: ShardAssignment | None
    ) -> BackupRefused:
        """A refusal, which states no epoch of another placement: such epochs cannot be compared."""
        is_same_placement = isinstance(message, UpdateMessage) or message.placement_id in (
            "",
            self._placement_ids.get(message.key),
        )
        newest = assignment.epoch if assignment is not None and is_same_placement else 0
        return BackupRefused(
            message.key, message.epoch, BackupRefusalReason.OTHER_HOLDERS, str(assignment), newest
        )

    def _offered(
        self, peer: Holder, link: int, offer: Offer, assignment: ShardAssignment | None
    ) -> Iterator[Effect]:
        key = offer.key
        copy = self._held.get(key)
        if copy is not None and copy.phase is CopyPhase.SETTLING:
            self._pending.setdefault(key, _PendingOffers()).offers.append((peer, link, offer))
        elif self._is_sent_by_primary(assignment, peer, offer):
            yield SendReply(peer, link, self._holds(peer, offer))
        else:
            # The primary may have read a newer record.
            pending = self._pending.setdefault(key, _PendingOffers())
            pending.offers.append((peer, link, offer))
            if not pending.is_reading:
                pending.is_reading = True
                yield RefreshShardRecord(key)

    def _holds(self, peer: Holder, offer: Offer) -> Reply:
        key = offer.key
        copy, incoming = self._held.get(key), self._incoming.get(key)
        is_from_peer = incoming is not None and (incoming.peer, incoming.start.epoch) == (
            peer,
            offer.epoch,
        )
        return BackupState(
            key,
            offer.epoch,
            copy_epoch=copy.epoch if copy is not None else 0,
            born=copy.born if copy is not None else 0,
            version=copy.received if copy is not None else 0,
            image=incoming.start.image if incoming is not None and is_from_peer else 0,
            next_chunk=incoming.come if incoming is not None and is_from_peer else 0,
        )

    def answer_offers(self, key: Key, assignment: ShardAssignment | None) -> Iterator[Effect]:
        """Answer waiting offers: the record was read, or the copy has settled."""
        pending = self._pending.pop(key, None)
        for peer, link, offer in pending.offers if pending is not None else ():
            if self._is_sent_by_primary(assignment, peer, offer):
                yield from self._offered(peer, link, offer, assignment)
            else:
                yield SendReply(peer, link, self._other_holders(offer, assignment))

    def _continued(
        self, peer: Holder, link: int, request: CopyUpToDate, assignment: ShardAssignment | None
    ) -> Iterator[Effect]:
        key, copy = request.key, self._held.get(request.key)
        if copy is None or assignment is None or copy.received != request.version:
            yield SendReply(
                peer,
                link,
                BackupRefused(key, request.epoch, BackupRefusalReason.NO_COPY, str(copy)),
            )
            return
        copy.primary, copy.epoch, copy.content = peer, request.epoch, assignment.content
        yield from self._forget_image(key)
        yield EnterEpoch(key, request.epoch)
        yield SendReply(peer, link, ImageInstalled(key, request.epoch, 0, copy.received))

    def _record(
        self,
        peer: Holder,
        link: int,
        record: UpdateMessage,
        data: Data,
        assignment: ShardAssignment | None,
    ) -> Iterator[Effect]:
        """Accept a record that continues the copy, even if the newest assignment names another
        primary: the sender may count records as received once they are sent. A sender that the
        assignment does not name gets a refusal as well."""
        key, copy = record.key, self._held.get(record.key)
        is_named = self._is_sent_by_primary(assignment, peer, record)
        if (
            copy is None
            or (copy.primary, copy.epoch) != (peer, record.epoch)
            or record.version > copy.received + 1
        ):
            refusal = BackupRefused(key, record.epoch, BackupRefusalReason.NO_COPY, str(copy))
            yield SendReply(
                peer, link, refusal if is_named else self._other_holders(record, assignment)
            )
            return
        is_next = record.version == copy.received + 1
        if is_next:
            copy.received = record.version
        # Reply before the record is applied: a push waits for the reply.
        if is_named:
            received = RecordsReceived(key, record.epoch, copy.received)
            yield SendReply(peer, link, received, record.answer_may_wait)
        else:
            yield SendReply(peer, link, self._other_holders(record, assignment))
        if is_next:
            yield AcceptRequest(record, data)

    # --- images ---

    def _image(self, peer: Holder, link: int, start: ImageStart, data: Data) -> Iterator[Effect]:
        key, incoming = start.key, self._incoming.get(start.key)
        if (
            incoming is not None
            and (incoming.peer, incoming.start.image) == (peer, start.image)
            and incoming.come == start.next_chunk
        ):
            incoming.link = link
            # A reply about these chunks may have been lost with the earlier link.
            yield SendReply(peer, link, ChunkReceived(key, start.image, incoming.stored))
            return
        yield from self._forget_image(key)
        if start.next_chunk:
            yield SendReply(
                peer,
                link,
                BackupRefused(key, start.epoch, BackupRefusalReason.NO_COPY, "no such image"),
            )
            return
        self._incoming[key] = IncomingImage(peer, link, start)
        yield AcceptRequest(start, data)

    def _chunk(self, peer: Holder, link: int, chunk: ImageChunk, data: Data) -> Iterator[Effect]:
        incoming = self._incoming.get(chunk.key)
        if (
            incoming is not None
            and (incoming.peer, incoming.link, incoming.start.image) == (peer, link, chunk.image)
            and chunk.index == incoming.come
        ):
            incoming.come += 1
            yield AcceptRequest(chunk, data)

    def stored(self, key: Key, image: int, index: int) -> Iterator[Effect]:
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.start.image == image:
            incoming.stored = index + 1
            yield SendReply(
                incoming.peer, incoming.link, ChunkReceived(key, image, incoming.stored)
            )

    def restored(
        self, key: Key, image: int, assignment: ShardAssignment | None
    ) -> Iterator[Effect]:
        """Adopt the shard built from the image, unless the record does not name the sender, or a
        copy of the epoch is newer."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.start.image != image:
            yield DropImage(key, image)
            return
        start, peer, link = incoming.start, incoming.peer, incoming.link
        copy = self._held.get(key)
        if assignment is None or not self._is_sent_by_primary(assignment, peer, start):
            yield from self._forget_image(key)
            yield SendReply(peer, link, self._other_holders(start, assignment))
        elif copy is not None and copy.epoch == start.epoch and copy.received > start.version:
            # The primary counts on the records that the copy has.
            yield from self._forget_image(key)
            yield SendReply(
                peer,
                link,
                BackupRefused(key, start.epoch, BackupRefusalReason.FAILED, "the image is older"),
            )
        else:
            del self._incoming[key]
            self._held[key] = Copy(peer, start.epoch, start.born, start.version, assignment.content)
            yield AdoptImage(key, image, start.epoch, start.version)
            yield SendReply(peer, link, ImageInstalled(key, start.epoch, image, start.version))

    def failed(
        self, key: Key, image: int, why: BackupRefusalReason, detail: str
    ) -> Iterator[Effect]:
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.start.image == image:
            del self._incoming[key]
            yield SendReply(
                incoming.peer, incoming.link, BackupRefused(key, incoming.start.epoch, why, detail)
            )

    def forget_unwanted_image(
        self, key: Key, assignment: ShardAssignment | None
    ) -> Iterator[Effect]:
        """Drop and refuse an image whose sender the record does not name. The sender may have read
        a later record, and would wait for an answer for ever."""
        incoming = self._incoming.get(key)
        if incoming is not None and not self._is_sent_by_primary(
            assignment, incoming.peer, incoming.start
        ):
            yield from self._forget_image(key)
            refusal = self._other_holders(incoming.start, assignment)
            yield SendReply(incoming.peer, incoming.link, refusal)

    def _forget_image(self, key: Key) -> Iterator[Effect]:
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            yield DropImage(key, incoming.start.image)
