"""State machine of one parameter server: leads and backs up shards, hands over, takes over, and
leads again from its journal.

The record in etcd assigns shards (`core/shards/assignments.py`), and this server follows each
change of it. The server changes a record when a joiner is in step, a holder is gone, a shard is
handed over, or only this server's disk has a shard. `wanted_record` is asked again at the time of
the write, so no outdated change is written.
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from shoal_server.core.processes import Holder
from shoal_server.core.replication.backing.copies import Copies, Copy, CopyPhase
from shoal_server.core.replication.backing.journal_claims import JournalClaims
from shoal_server.core.replication.backing.missing_shards import MissingShards
from shoal_server.core.replication.backing.primary_watch import PrimaryWatch
from shoal_server.core.replication.known_records import KnownRecords
from shoal_server.core.replication.leading.led_shard import LedShard
from shoal_server.core.replication.leading.led_shards import LedShards
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.effects import (
    AcknowledgeVersion,
    AckRefusalReason,
    CloseLink,
    DropShard,
    Effect,
    LeadShard,
    LoadJournal,
    LogLine,
    RefuseVersion,
    ReviseShardRecord,
    SendReply,
    SetLease,
    SettleCopy,
    StepDown,
    WriteShardRecord,
)
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import BackupRefusalReason, BackupRefused, Key
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    promote,
    was_handed_over,
)

Effects = Iterator[Effect]


class Lease:
    """Lease under which a server may acknowledge. Counted from the sending of the last successful
    renewal, it ends before other servers may assume the server dead."""

    def __init__(self, limits: ReplicationLimits) -> None:
        self._fenced_after_s = limits.fenced_after_s
        self.ends_s = -inf
        self._is_over = False

    def renewed(self, sent_s: float) -> None:
        if not self._is_over:
            self.ends_s = max(self.ends_s, sent_s + self._fenced_after_s)

    def end(self, now_s: float) -> None:
        """End the lease for good, also for a renewal in progress."""
        self.ends_s, self._is_over = now_s, True

    def holds(self, now_s: float) -> bool:
        return now_s < self.ends_s


class ReplicationCore:
    """Core of one server process. The caller carries out all effects of an event, in order, before
    those of the next event."""

    def __init__(self, me: Holder, limits: ReplicationLimits) -> None:
        self.me = me
        self.lease = Lease(limits)
        self.leading = LedShards(limits)
        self._records = KnownRecords()
        self._copies = Copies(me, self._records.placement_ids)
        self._watch = PrimaryWatch(limits.probe_s)
        self._claims = JournalClaims(me, limits)
        self._missing = MissingShards(me)
        self._is_fenced = False
        self._now_s = -inf
        self._handlers: Mapping[type, Callable[[Any], Effects]] = {
            ev.ShardAssigned: self._assigned,
            ev.ShardRecordRead: self._read,
            ev.ShardRecordWritten: self._written,
            ev.ShardRecordNotWritten: self._not_written,
            ev.ShardRecordRefreshed: self._refreshed,
            ev.LeaseRenewed: self._renewed,
            ev.LeaseEnded: self._lease_ended,
            ev.ShardCreated: self._created,
            ev.PushApplied: self._applied,
            ev.AckRequested: self._asked,
            ev.AckAbandoned: self._abandoned,
            ev.VersionJournaled: self._on_disk,
            ev.PushesStopped: self._stopped,
            ev.CopySettled: self._settled,
            ev.CopyFailed: self._copy_failed,
            ev.ShardRetired: self._forgotten,
            ev.LinkOpened: self._link_opened,
            ev.LinkBroken: self._link_broke,
            ev.RecordDelivered: self._held,
            ev.ReplyReceived: self._replied,
            ev.ImageMade: self._image_made,
            ev.ImageNotMade: self._image_not_made,
            ev.IncomingLinkOpened: self._incoming_opened,
            ev.IncomingLinkEnded: self._incoming_ended,
            ev.RequestReceived: self._requested,
            ev.ChunkStored: self._chunk_stored,
            ev.ImageRestored: self._image_restored,
            ev.ImageFailed: self._image_failed,
            ev.PeerProbed: self._probed,
            ev.JournalShardFound: self._journal_has,
            ev.JournalShardMissing: self._not_in_journal,
            ev.ServersListed: self._servers_seen,
            ev.WakeTimeReached: self._woken,
        }

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        self._now_s = now_s
        return [*self._passed(), *self._handlers[type(event)](event)]

    def wakes_s(self) -> float:
        """Time of the next `WakeTimeReached`; infinite if none is due."""
        lease_s = inf if self._is_fenced else self.lease.ends_s
        return min(self.leading.wakes_s, self._watch.wakes_s, lease_s if lease_s > -inf else inf)

    # --- state that operators and recovery ask for ---

    def keys_of(self, job: str) -> list[Key]:
        return self._records.keys_of(job)

    def find_led(self, key: Key) -> LedShard | None:
        return self.leading.find(key)

    @property
    def open_claims(self) -> list[Key]:
        """Open claims with a known record."""
        return [key for key in self._claims.open if key in self._records]

    def wanted_record(self, key: Key, assignment: ShardAssignment, now_s: float) -> ShardAssignment:
        led = self.leading.find(key)
        if led is not None and (assignment.primary, assignment.epoch) == (self.me, led.epoch):
            return led.wanted_record(assignment)
        primary = assignment.primary
        if self._watch.is_dead(primary) and self._copies.is_held(key):
            assignment = promote(assignment, primary, self.me)
        elif led is None and self._copies.find(key) is None and key not in self._claims:
            assignment = self._missing.wanted_record(key, assignment)
        return self._claims.wanted_record(key, assignment, now_s)

    # --- the record ---

    def _write_if_wanted(self, key: Key) -> Effects:
        assignment = self._records.find(key)
        if assignment is None or self._records.is_writing(key):
            return
        if self.wanted_record(key, assignment, self._now_s) != assignment:
            self._records.begin_write(key)
            yield WriteShardRecord(key)
        else:
            led = self.leading.find(key)
            if led is not None:
                led.written()

    def _read(self, event: ev.ShardRecordRead) -> Effects:
        key = event.key
        yield ReviseShardRecord(key, self.wanted_record(key, event.assignment, self._now_s))

    def _written(self, event: ev.ShardRecordWritten) -> Effects:
        self._records.end_write(event.key)
        if (led := self.leading.find(event.key)) is not None:
            led.written()
            yield from self._take_due_steps(led)
        else:
            yield from self._write_if_wanted(event.key)

    def _not_written(self, event: ev.ShardRecordNotWritten) -> Effects:
        if (led := self.leading.find(event.key)) is not None:
            yield from led.keep_leading()

    def _refreshed(self, event: ev.ShardRecordRefreshed) -> Effects:
        yield from self._copies.answer_offers(event.key, self._records.find(event.key))

    def _assigned(self, event: ev.ShardAssigned) -> Effects:
        key, new = event.key, event.assignment
        if new is not None and self._records.is_of_another_placement(key, event.placement_id):
            # Drop shards of the old placement: they are different shards.
            yield from self._assigned(ev.ShardAssigned(key, None))
        old = self._records.store_record(key, new, event.placement_id)
        if old is not None and self.me in old.backups:
            self._watch.stop_watching(key, old.primary)
        if old is not None and (new is None or self.me not in new.holders):
            # The old primary must not count on a copy here.
            yield from self._refuse_dropped(key, old)
        yield from self._copies.forget_unwanted_image(key, new)
        if new is None or self.me not in new.holders:
            yield from self._drop_roles(key)
            if new is None:
                self._claims.remove(key)
        elif new.primary == self.me:
            yield from self._to_lead(key, new, stopped=was_handed_over(old, new))
        else:
            yield from self._to_back_up(key, new)
        if new is not None:
            self._claims.note_record(key, new)
        yield from self._write_if_wanted(key)

    def _refuse_dropped(self, key: Key, old: ShardAssignment | None) -> Effects:
        if old is not None and self._copies.find(key) is not None:
            refusal = BackupRefused(
                key, old.epoch, BackupRefusalReason.NO_COPY, "the copy was dropped"
            )
            for link in self._watch.open_links(old.primary):
                yield SendReply(old.primary, link, refusal)

    def _drop_roles(self, key: Key) -> Effects:
        led = self.leading.find(key)
        if led is not None:
            self._leave_on_disk(led)
            yield from self.leading.end(key)
            yield DropShard(key)
        yield from self._copies.drop(key)

    def _leave_on_disk(self, led: LedShard) -> None:
        """Keep the claim while the record names this server's disk: a disk that fails may still
        hold the only copy."""
        if led.assignment.on_disk == self.me.server_id:
            self._claims.note_given_up(led.key)

    def _to_lead(self, key: Key, new: ShardAssignment, *, stopped: bool = False) -> Effects:
        led, copy = self.leading.find(key), self._copies.find(key)
        if led is not None and led.epoch == new.epoch:
            led.assignment = new
            yield from self._take_due_steps(led)
        elif led is not None:
            if new.content is not ShardContent.PRESENT:
                # The shard was emptied, lost or restored: its values here are useless.
                yield from self._drop_roles(key)
            else:
                yield from self._step_down(led)
        elif copy is not None:
            if copy.is_of_other_content(new):
                yield from self._copies.drop(key)
            elif copy.phase is CopyPhase.HELD:
                copy.phase = CopyPhase.SETTLING
                yield SettleCopy(key, None if stopped else copy.primary)
        elif key in self._claims and new.content is ShardContent.PRESENT:
            self._claims.remove(key)
            if new.on_disk == self.me.server_id:
                self._missing.tolerate_absence(key, new)
                yield LoadJournal(key, new.epoch)

    def _to_back_up(self, key: Key, new: ShardAssignment) -> Effects:
        led, copy = self.leading.find(key), self._copies.find(key)
        if led is not None:
            yield from self._step_down(led)
        elif copy is not None and copy.is_of_other_content(new):
            yield from self._copies.drop(key)
        elif copy is not None and copy.epoch == new.epoch:
            copy.content = new.content
        if self.me in new.backups:
            yield from self._watch.watch_primary(key, new.primary)
        if self.me in (new.joining, new.successor):
            # This server may lead the shard soon, with these servers as followers.
            for holder in sorted({new.primary, *new.backups} - {self.me}):
                yield from self.leading.links.connect(holder)

    # --- leading ---

    def _begin(self, led: LedShard) -> Effects:
        self._claims.remove(led.key)
        led.placement_id = self._records.placement_ids.get(led.key, "")
        self.leading.begin(led)
        yield LeadShard(led.key, led.epoch, led.placement_id)
        yield from self._take_due_steps(led)

    def _take_due_steps(self, led: LedShard) -> Effects:
        yield from self.leading.follow_record(led)
        yield from self.leading.report_followers(led)
        yield from self.leading.take_due_steps(led, self._now_s)
        yield from self._release(led)
        yield from self._trim(led)
        yield from self._write_if_wanted(led.key)

    def _trim(self, led: LedShard) -> Effects:
        led.trim()
        return led.report_unreplicated()

    def _release(self, led: LedShard) -> Effects:
        if not led.has_waiters:
            return
        holds = self.lease.holds(self._now_s)
        for token in led.release_waiters():
            yield (
                AcknowledgeVersion(token)
                if holds
                else RefuseVersion(token, AckRefusalReason.FENCED)
            )

    def _step_down(self, led: LedShard) -> Effects:
        content = led.assignment.content
        self._leave_on_disk(led)
        yield from self.leading.end(led.key)
        copy = Copy(self.me, led.epoch, led.born, led.version, content, CopyPhase.SETTLING)
        self._copies.keep(led.key, copy)
        yield StepDown(led.key, self._records[led.key].epoch)

    def _settled(self, event: ev.CopySettled) -> Effects:
        key, new = event.key, self._records.find(event.key)
        copy = self._copies.find(key)
        if copy is None or copy.phase is not CopyPhase.SETTLING:
            return
        if copy.received > event.version:
            yield SettleCopy(key)  # Further records were received meanwhile.
            return
        copy.phase, copy.received = CopyPhase.HELD, event.version
        if new is not None and copy.is_of_other_content(new):
            yield from self._copies.drop(key)
        elif new is not None and new.primary == self.me:
            self._copies.pop(key)
            led = self.leading.make_led_shard(
                key, new, event.version, origin=copy.epoch, born=copy.born
            )
            yield from self._begin(led)
        else:
            yield from self._write_if_wanted(key)
        yield from self._copies.answer_offers(key, new)

    def _created(self, event: ev.ShardCreated) -> Effects:
        key, new = event.key, self._records.find(event.key)
        if self.leading.find(key) is not None:
            return
        if new is None or (new.primary, new.epoch) != (self.me, event.epoch):
            yield DropShard(key)
            return
        yield from self._copies.drop(key)
        led = self.leading.make_led_shard(key, new, event.version, origin=0, born=event.epoch)
        yield from self._begin(led)

    def _applied(self, event: ev.PushApplied) -> Effects:
        led = self.leading.find(event.key)
        if led is None or event.record.version <= led.version:
            return
        led.append(event.record)
        yield from self.leading.send_update(led, event.record)
        if not led.followers:
            yield from self._release(led)
        yield from led.report_unreplicated()

    def _asked(self, event: ev.AckRequested) -> Effects:
        led = self.leading.find(event.key)
        if led is None or led.epoch != event.epoch:
            yield RefuseVersion(event.token, AckRefusalReason.DEPOSED)
        elif not self.lease.holds(self._now_s):
            yield RefuseVersion(event.token, AckRefusalReason.FENCED)
        else:
            answer = led.answer_or_wait(event.token, event.version, event.level)
            if answer is not None:
                yield answer

    def _abandoned(self, event: ev.AckAbandoned) -> Effects:
        if (led := self.leading.find(event.key)) is not None:
            led.abandon(event.token)
        yield from ()

    def _on_disk(self, event: ev.VersionJournaled) -> Effects:
        if (led := self.leading.find(event.key)) is None:
            return
        if event.version is None:
            yield from led.disk_failed()
        else:
            self.leading.note_journaled(led, event.version, self._now_s)
            yield from self._release(led)
            yield from self._write_if_wanted(event.key)

    def _stopped(self, event: ev.PushesStopped) -> Effects:
        if (led := self.leading.find(event.key)) is not None:
            led.stopped(event.version)
            yield from self._take_due_steps(led)

    def _copy_failed(self, event: ev.CopyFailed) -> Effects:
        yield LogLine("copy_failed", key=event.key)
        yield from self._refuse_dropped(event.key, self._records.find(event.key))
        yield from self._copies.drop(event.key)
        yield from self._write_if_wanted(event.key)

    def _forgotten(self, event: ev.ShardRetired) -> Effects:
        self._missing.tolerate_absence(event.key, self._records.find(event.key))
        yield from self._drop_roles(event.key)

    # --- links from this server ---

    def _link_opened(self, event: ev.LinkOpened) -> Effects:
        links = self.leading.links
        if not links.is_current(event.peer, event.link):
            yield CloseLink(event.peer, event.link)
            return
        links.mark_open(event.peer)
        for led in self.leading.shards_followed_by(event.peer):
            yield from self.leading.offer(led, event.peer)

    def _link_broke(self, event: ev.LinkBroken) -> Effects:
        if not self.leading.links.is_current(event.peer, event.link):
            return
        touched = self.leading.handle_link_break(event, self._now_s)
        yield from touched.effects
        for led in touched.shards:
            yield from self._take_due_steps(led)

    def _held(self, event: ev.RecordDelivered) -> Effects:
        if (led := self.leading.note_delivery(event)) is not None:
            yield from self._release(led)

    def _replied(self, event: ev.ReplyReceived) -> Effects:
        if not self.leading.links.is_current(event.peer, event.link):
            return
        self.leading.links.note_reply(event.peer)
        touched = self.leading.replied(event.peer, event.reply, self._now_s)
        yield from touched.effects
        for led in touched.shards:
            if led.is_changing:
                yield from self._take_due_steps(led)
            else:
                yield from self._release(led)
                yield from self._trim(led)

    def _image_made(self, event: ev.ImageMade) -> Effects:
        yield from self.leading.image_made(event)

    def _image_not_made(self, event: ev.ImageNotMade) -> Effects:
        yield LogLine("image_not_taken", key=event.key, detail=event.detail)
        yield from self.leading.image_not_made(event)
        if (led := self.leading.find(event.key)) is not None:
            yield from self._take_due_steps(led)

    # --- links to this server ---

    def _incoming_opened(self, event: ev.IncomingLinkOpened) -> Effects:
        self._watch.record_link(event.peer, event.link)
        yield from ()

    def _incoming_ended(self, event: ev.IncomingLinkEnded) -> Effects:
        for key in self._copies.keys_from(event.peer) if event.is_torn else ():
            yield LogLine("copy_torn", key=key, peer=event.peer)
            yield from self._copy_failed(ev.CopyFailed(key))
        yield from self._watch.remove_link(event.peer, event.link)

    def _requested(self, event: ev.RequestReceived) -> Effects:
        if self._watch.has_link(event.peer, event.link):
            assignment = self._records.find(event.request.key)
            yield from self._copies.requested(
                event.peer, event.link, event.request, event.data, assignment
            )

    def _chunk_stored(self, event: ev.ChunkStored) -> Effects:
        yield from self._copies.stored(event.key, event.image, event.index)

    def _image_restored(self, event: ev.ImageRestored) -> Effects:
        yield from self._copies.restored(event.key, event.image, self._records.find(event.key))
        yield from self._write_if_wanted(event.key)

    def _image_failed(self, event: ev.ImageFailed) -> Effects:
        why = BackupRefusalReason.FULL if event.is_full else BackupRefusalReason.FAILED
        yield from self._copies.failed(event.key, event.image, why, event.detail)

    def _probed(self, event: ev.PeerProbed) -> Effects:
        yield from self._watch.record_probe(event.peer, event.answers, self._now_s)
        for key in (
            self._watch.watched_shards(event.peer) if self._watch.is_dead(event.peer) else ()
        ):
            yield from self._write_if_wanted(key)

    # --- after a restart ---

    def _journal_has(self, event: ev.JournalShardFound) -> Effects:
        self._claims.note_journaled(event.key, event.epoch, event.version)
        yield from self._write_if_wanted(event.key)

    def _not_in_journal(self, event: ev.JournalShardMissing) -> Effects:
        yield LogLine("shard_not_in_journal", key=event.key)
        self._claims.note_missing(event.key, event.epoch)
        yield from self._write_if_wanted(event.key)

    def _servers_seen(self, event: ev.ServersListed) -> Effects:
        keys = self.open_claims
        self._claims.note_servers(
            event.present,
            event.ended,
            self._records.holders_of(keys),
            asked_s=event.asked_s,
            now_s=self._now_s,
        )
        for key in keys:
            yield from self._write_if_wanted(key)

    # --- time ---

    def _renewed(self, event: ev.LeaseRenewed) -> Effects:
        self.lease.renewed(event.sent_s)
        yield SetLease(self.lease.ends_s)
        if self._is_fenced and self.lease.holds(self._now_s):
            self._is_fenced = False
            yield LogLine("acknowledges_again")

    def _lease_ended(self, event: ev.LeaseEnded) -> Effects:
        self.lease.end(self._now_s)
        yield SetLease(self.lease.ends_s)
        yield from self._passed()

    def _woken(self, event: ev.WakeTimeReached) -> Effects:
        yield from self._watch.due_probes(self._now_s)
        yield from self.leading.links.reopen_due(self._now_s)
        for led in self.leading.due_shards(self._now_s):
            yield from self._take_due_steps(led)

    def _passed(self) -> Effects:
        if self._is_fenced or self.lease.ends_s == -inf or self.lease.holds(self._now_s):
            return
        self._is_fenced = True
        yield LogLine("acknowledges_nothing")
        for led in self.leading.all():
            yield from led.refuse_waiters(AckRefusalReason.FENCED)
