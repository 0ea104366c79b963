"""Shards led by this server, and the servers that follow them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from shoal_server.core.processes import Holder
from shoal_server.core.replication.leading.followers import Follower, FollowerPhase
from shoal_server.core.replication.leading.full_peers import FullPeers
from shoal_server.core.replication.leading.led_shard import LedShard
from shoal_server.core.replication.leading.links import Link, ReplicationLinks
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.effects import (
    AckRefusalReason,
    CloseImage,
    Effect,
    LogLine,
    MakeImage,
    SendRequest,
)
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import (
    BackupRefusalReason,
    BackupRefused,
    BackupState,
    ChunkReceived,
    CopyUpToDate,
    ImageChunk,
    ImageInstalled,
    ImageStart,
    Key,
    Offer,
    RecordsReceived,
    Reply,
    UpdateMessage,
)
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.shard_log import Record

TOGETHER_S = 0.05
"""Handovers that become due within this time are made together."""


@dataclass(slots=True)
class TouchedShards:
    """Immediate effects, and the shards whose due steps follow them."""

    effects: list[Effect] = field(default_factory=list)
    shards: list[LedShard] = field(default_factory=list)


class LedShards:
    def __init__(self, limits: ReplicationLimits) -> None:
        self.links = ReplicationLinks(limits)
        self.full = FullPeers(limits)
        self.keeps_journal = False
        """True if shards led from now on are kept on disk."""
        self._shards: dict[Key, LedShard] = {}
        self._last_image = 0
        self._disk_report_s = limits.disk_report_s
        self._reports_disk_s = inf
        self._announced_s = limits.announced_s
        self._hands_over_s = inf

    def find(self, key: Key) -> LedShard | None:
        return self._shards.get(key)

    def all(self) -> Iterable[LedShard]:
        return list(self._shards.values())

    def make_led_shard(
        self, key: Key, assignment: ShardAssignment, version: int, *, origin: int, born: int
    ) -> LedShard:
        keeps = self.keeps_journal
        return LedShard(key, assignment, version, origin=origin, born=born, keeps=keeps)

    def begin(self, led: LedShard) -> None:
        self._shards[led.key] = led

    def end(self, key: Key) -> Iterator[Effect]:
        """Stop leading a shard in its epoch, and refuse its waiters."""
        led = self._shards.pop(key)
        yield from led.refuse_waiters(AckRefusalReason.DEPOSED)
        for holder in led.followers:
            yield from self._unfollow(led.key, holder)

    def shards_followed_by(self, peer: Holder) -> list[LedShard]:
        found = (self._shards.get(key) for key in self.links.keys(peer))
        return [led for led in found if led is not None and peer in led.followers]

    # --- followers ---

    def follow_record(self, led: LedShard) -> Iterator[Effect]:
        """Make the record's other holders followers. Leave out lost holders, and a full joiner
        unless the shard uses the link to it already."""
        joining = led.assignment.joining
        wanted = set(led.assignment.holders[1:]) - led.lost
        is_full = joining is not None and self.full.is_full(joining)
        if joining is not None and is_full and not self.links.is_used(joining, led.key):
            wanted.discard(joining)
        for follower in led.retain_followers(frozenset(wanted)):
            yield from self._unfollow(led.key, follower.holder)
        # A lost holder may be named again: it stayed a follower during a write.
        for holder in sorted(wanted):
            if not self.links.is_used(holder, led.key):
                yield from self.links.add_use(holder, led.key)
                if self.links.opened(holder) is not None:
                    yield from self.offer(led, holder)

    def _unfollow(self, key: Key, holder: Holder) -> Iterator[Effect]:
        yield from self.links.remove_use(holder, key)
        yield from self._next_image(holder)

    def offer(self, led: LedShard, peer: Holder) -> Iterator[Effect]:
        """Offer the shard to a peer, which answers with the state of its copy."""
        link, follower = self.links.opened(peer), led.followers.get(peer)
        if link is not None and follower is not None and peer not in led.lost:
            follower.phase = FollowerPhase.OFFERED
            yield SendRequest(
                peer, link.number, Offer(led.key, led.epoch, led.born, led.placement_id)
            )

    def report_followers(self, led: LedShard) -> Iterator[Effect]:
        yield from led.report_followers(tuple(self._links_of(led)))

    def send_update(self, led: LedShard, record: Record) -> Iterator[Effect]:
        for holder, link in self._links_of(led):
            update = UpdateMessage(led.key, led.epoch, record.version)
            yield SendRequest(holder, link, update, record)

    def _links_of(self, led: LedShard) -> Iterator[tuple[Holder, int]]:
        for holder, follower in led.followers.items():
            if follower.phase is FollowerPhase.FOLLOWING:
                link = self.links.opened(holder)
                if link is not None:
                    yield holder, link.number

    def note_delivery(self, event: ev.RecordDelivered) -> LedShard | None:
        """Return the shard if the follower's `received` rises, else None."""
        led = self._shards.get(event.key)
        follower = led.followers.get(event.peer) if led is not None else None
        is_current = self.links.is_current(event.peer, event.link)
        if led is None or follower is None or led.epoch != event.epoch or not is_current:
            return None
        return led if follower.note_held_version(event.version) else None

    # --- replies of followers ---

    def replied(self, peer: Holder, reply: Reply, now_s: float) -> TouchedShards:
        touched = TouchedShards()
        link = self.links.opened(peer)
        if link is None:
            return touched
        if isinstance(reply, ChunkReceived):
            for each in link.images.note_acknowledged(reply.image, reply.next_chunk):
                effect = (
                    SendRequest(peer, link.number, each) if isinstance(each, ImageChunk) else each
                )
                touched.effects.append(effect)
            return touched
        led = self._shards.get(reply.key)
        follower = led.followers.get(peer) if led is not None else None
        if led is None or follower is None or reply.epoch != led.epoch:
            return touched
        match reply:
            case RecordsReceived():
                if follower.phase is FollowerPhase.FOLLOWING and follower.note_received(
                    reply.version
                ):
                    touched.shards.append(led)
            case ImageInstalled():
                self._installed(touched, led, follower, link, reply)
            case BackupState():
                touched.effects += self._holds(led, follower, link, reply)
            case BackupRefused():
                self._refused(touched, led, follower, reply, now_s)
        return touched

    def _installed(
        self,
        touched: TouchedShards,
        led: LedShard,
        follower: Follower,
        link: Link,
        reply: ImageInstalled,
    ) -> None:
        """Begin to send records: the image is installed, or the existing copy is valid."""
        current = link.images.current
        if reply.image:
            is_awaited = current is not None and current.number == reply.image
        else:
            is_awaited = follower.phase is FollowerPhase.CONTINUING
        if not is_awaited:
            return
        peer = follower.holder
        if self.full.note_copied(peer):
            touched.effects.append(LogLine("copies_taken_again", peer=peer))
        follower.begin(reply.version, led.version)
        touched.effects += link.images.drop(led.key)
        for record in led.log.records_after(reply.version):
            update = UpdateMessage(led.key, led.epoch, record.version)
            touched.effects.append(SendRequest(peer, link.number, update, record))
        touched.effects += self.report_followers(led)
        touched.effects += self._next_image(peer)
        touched.shards.append(led)

    def _holds(
        self, led: LedShard, follower: Follower, link: Link, reply: BackupState
    ) -> Iterator[Effect]:
        if follower.phase is not FollowerPhase.OFFERED:
            return
        peer = follower.holder
        if reply.version and led.continues(reply.copy_epoch, reply.born, reply.version):
            follower.phase = FollowerPhase.CONTINUING
            follower.image_version = reply.version
            goes_on = CopyUpToDate(led.key, led.epoch, reply.version, led.placement_id)
            yield SendRequest(peer, link.number, goes_on)
            return
        follower.phase = FollowerPhase.IMAGE
        if link.images.may_continue(led.key, reply.image, reply.next_chunk):
            for request in link.images.resume_from(reply.next_chunk):
                yield SendRequest(peer, link.number, request)
            return
        yield from link.images.drop(led.key)
        # The follower's copy is useless, so it has received nothing yet.
        follower.forget()
        link.images.add(led.key)
        yield from self._next_image(peer)

    def _refused(
        self,
        touched: TouchedShards,
        led: LedShard,
        follower: Follower,
        reply: BackupRefused,
        now_s: float,
    ) -> None:
        peer = follower.holder
        if reply.why is BackupRefusalReason.FULL:
            if self.full.note_refusal(peer, reply.detail, now_s):
                note = LogLine("copies_refused", peer=peer, detail=reply.detail)
                touched.effects.append(note)
            # Waiting shards may be copied to other servers that have memory.
            for other in self._waiting_for(peer):
                self._lose(touched, other, peer)
        else:
            touched.effects += led.note_newer_epoch(reply.newest_epoch)
            detail = f"{reply.why.value}: {reply.detail}"
            touched.effects.append(LogLine("copy_refused", led.key, peer, detail))
        self._lose(touched, led, peer)
        touched.effects += self._next_image(peer)

    def _waiting_for(self, peer: Holder) -> list[LedShard]:
        link = self.links.find(peer)
        keys = link.images.waiting if link is not None else []
        shards = [self._shards[key] for key in keys if key in self._shards]
        return [led for led in shards if led.assignment.joining == peer]

    def _lose(self, touched: TouchedShards, led: LedShard, peer: Holder) -> None:
        led.mark_lost(peer)
        touched.effects += self.links.remove_use(peer, led.key)
        touched.shards.append(led)

    # --- images ---

    def _next_image(self, peer: Holder) -> Iterator[Effect]:
        link = self.links.opened(peer)
        key = link.images.next_image(self._last_image + 1) if link is not None else None
        if key is None:
            return
        self._last_image += 1
        led = self._shards.get(key)
        follower = led.followers.get(peer) if led is not None else None
        if led is not None and follower is not None:
            # Keep the records of later pushes: the image may lack them.
            follower.image_version = led.version
        yield MakeImage(key, self._last_image)

    def image_made(self, event: ev.ImageMade) -> Iterator[Effect]:
        led = self._shards.get(event.key)
        for peer in led.followers if led is not None else ():
            link = self.links.find(peer)
            current = link.images.current if link is not None else None
            if led is None or link is None or current is None or current.number != event.image:
                continue
            led.followers[peer].image_version = event.version
            start = ImageStart(
                event.key,
                led.epoch,
                led.born,
                event.image,
                event.version,
                event.num_chunks,
                placement_id=led.placement_id,
            )
            if self.links.opened(peer) is None:
                # Over the next link the peer is asked for its state first.
                current.start = start
                return
            for request in link.images.begin(start):
                yield SendRequest(peer, link.number, request)
            return
        yield CloseImage(event.image)

    def image_not_made(self, event: ev.ImageNotMade) -> Iterator[Effect]:
        led = self._shards.get(event.key)
        for peer in list(led.followers) if led is not None else ():
            link = self.links.find(peer)
            current = link.images.current if link is not None else None
            if led is not None and current is not None and current.number == event.image:
                touched = TouchedShards()
                self._lose(touched, led, peer)
                yield from touched.effects
                yield from self._next_image(peer)

    # --- links ---

    def handle_link_break(self, event: ev.LinkBroken, now_s: float) -> TouchedShards:
        peer, touched = event.peer, TouchedShards()
        link = self.links.find(peer)
        assert link is not None
        failing = link.images.record_link_break()
        followed = self.shards_followed_by(peer)
        for led in followed:
            led.followers[peer].unlink()
            touched.effects += self.report_followers(led)
        if failing is not None and failing in self._shards:
            note = LogLine("copy_refused", failing, peer, "each link broke during its image")
            touched.effects.append(note)
            self._lose(touched, self._shards[failing], peer)
        if self.links.record_link_break(event, now_s):
            self.full.forget(peer)
            touched.effects += self.links.end(peer)
            if followed:
                touched.effects.append(LogLine("backup_lost", peer=peer))
            for led in followed:
                self._lose(touched, led, peer)
        return touched

    @property
    def wakes_s(self) -> float:
        return min(self.links.wakes_s, self.full.wakes_s, self._reports_disk_s, self._hands_over_s)

    def take_due_steps(self, led: LedShard, now_s: float) -> Iterator[Effect]:
        yield from led.take_due_steps(now_s, self._announced_s)
        if led.handover.is_announced and led.handover.stops_from_s > now_s:
            self._hands_over_s = min(self._hands_over_s, led.handover.stops_from_s)

    def due_shards(self, now_s: float) -> list[LedShard]:
        return [
            *self.retryable_shards(now_s),
            *self.newer_on_disk(now_s),
            *self._handovers_due(now_s),
        ]

    def _handovers_due(self, now_s: float) -> list[LedShard]:
        """All announced handovers, once one of them is due. Those due within TOGETHER_S become due
        too, so that workers pause only once."""
        if now_s < self._hands_over_s:
            return []
        self._hands_over_s = inf
        announced = [led for led in self._shards.values() if led.handover.is_announced]
        for led in announced:
            if led.handover.stops_from_s <= now_s + TOGETHER_S:
                led.handover.stops_from_s = now_s
        return announced

    def note_journaled(self, led: LedShard, version: int, now_s: float) -> None:
        led.note_journaled(version)
        self._reports_disk_s = min(self._reports_disk_s, now_s + self._disk_report_s)

    def newer_on_disk(self, now_s: float) -> list[LedShard]:
        """Shards whose version on disk is to be written to the record now."""
        if now_s < self._reports_disk_s:
            return []
        self._reports_disk_s = inf
        return [led for led in self._shards.values() if led.note_disk_version()]

    def retryable_shards(self, now_s: float) -> list[LedShard]:
        due: list[LedShard] = []
        for peer in self.full.expired(now_s):
            shards = [led for led in self._shards.values() if led.assignment.joining == peer]
            if not shards:
                self.full.forget(peer)
            due += shards
        return due
