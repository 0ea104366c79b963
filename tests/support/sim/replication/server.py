"""A process of a parameter server: the real replication core in a shell in virtual time."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from support.sim.replication.copies import ServerCopies
from support.sim.replication.machine import SimProcess
from support.sim.replication.peers import ServerPeers
from support.sim.replication.registration import ServerRegistration
from support.sim.replication.setting import Setting
from support.sim.replication.shard import Copy, Disk, SimRecord, Update

from shoal_server.core.processes import Holder
from shoal_server.core.replication.backing.missing_shards import DiskRemoval
from shoal_server.core.replication.protocol import effects as fx
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.events import AckLevel
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.replication.replication_core import ReplicationCore
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.api import KeyValue

Answer = Callable[[str], None]
"""Sends a worker the outcome of its push."""
RETRY_S = 0.1
LOOK_EACH_S = 1.0


class SimServer:
    def __init__(
        self, setting: Setting, me: Holder, disk: Disk | None, ended: frozenset[Holder]
    ) -> None:
        """`ended`: earlier processes of this server that are known to have ended."""
        self.setting = setting
        self.me = me
        self.process = SimProcess(setting.clock, f"{me.server_id}#{me.incarnation}")
        self.core = ReplicationCore(me, setting.limits)
        self.core.leading.keeps_journal = disk is not None
        self.disk = disk
        self.recovered = dict(disk.shards) if disk is not None else {}
        """Contents of the disk when the process began."""
        self.has_lost_disk = False
        """True if another process has taken the disk."""
        self.copies = ServerCopies(self, setting)
        self.peers = ServerPeers(self, setting)
        self.registration = ServerRegistration(self, setting)
        self.waiting: dict[Any, tuple[Key, int, int, AckLevel, Answer]] = {}
        """Key, epoch, version, level and answer of each acknowledgement that is awaited, by
        token."""
        self.ended = ended
        self.is_ending = False
        """True once the process has announced its end; it then acknowledges nothing."""
        self._disowning = DiskRemoval(me, setting.limits)
        self._records = self.registration.records
        self._revised: dict[Key, ShardAssignment] = {}
        self._wakes_at_s = float("inf")
        self._posted: deque[tuple[ev.Event, Copy | None]] = deque()
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            fx.WriteShardRecord: lambda effect: self._write(effect.key),
            fx.ReviseShardRecord: self._revise,
            fx.SetLease: lambda effect: None,
            fx.RefreshShardRecord: lambda effect: self._refresh(effect.key),
            fx.AcknowledgeVersion: self._acknowledge,
            fx.RefuseVersion: self._refuse,
            fx.LogLine: lambda effect: None,
            **self.copies.handlers,
            **self.peers.handlers,
        }

    def start(self) -> None:
        for key, kept in self.recovered.items():
            self.submit_event(ev.JournalShardFound(key, kept.epoch, len(kept.updates)))
        self.setting.store.watch(self.process, self.record_received)
        self.process.act(0.05, self.registration.register)
        self.process.act(0.1, self._look_at_servers)

    def die(self) -> None:
        self.process.die()
        self.peers.died()

    # --- the core ---

    def submit_event(self, event: ev.Event) -> None:
        setting = self.setting
        setting.note(self.process.name, event)
        for effect in self.core.step(event, self.process.now_s):
            setting.note(self.process.name, effect)
            self._handlers[type(effect)](effect)
        wakes_s = self.core.wakes_s()
        if wakes_s < self._wakes_at_s:
            self._wakes_at_s = wakes_s
            self._wake_at(wakes_s)

    def _wake_at(self, wakes_s: float) -> None:
        def wake() -> None:
            if wakes_s != self._wakes_at_s:
                return
            self._wakes_at_s = float("inf")
            due_s = self.core.wakes_s()
            if due_s <= self.process.now_s:
                self.submit_event(ev.WakeTimeReached())
            elif due_s < float("inf"):
                self._wakes_at_s = due_s
                self._wake_at(due_s)

        self.process.act(self.process.in_s(wakes_s) + 1e-6, wake)

    def post(self, event: ev.Event, of: Copy | None = None) -> None:
        """Submit an event from another thread; events are handled in order. `of`: the copy that it
        is about. Events of a copy that is gone are discarded."""
        if not self._posted and self.setting.chance.random() < 0.8:
            self.submit_event(event)
            return
        self._posted.append((event, of))
        self.process.act(self.setting.chance.random() * 0.01, self._submit_posted)

    def _submit_posted(self) -> None:
        event, copy = self._posted.popleft()
        if copy is None or self.copies.found.get(copy.key) is copy:
            self.submit_event(event)
        elif isinstance(event, ev.AckRequested) and event.token in self.waiting:
            *_, answer = self.waiting.pop(event.token)
            answer("not here")

    # --- pushes and pulls ---

    def pushed(
        self,
        token: Any,
        key: Key,
        epoch: int,
        *,
        placement_id: str,
        update: Update | None,
        level: AckLevel,
        answer: Answer,
    ) -> None:
        """Handle a push, or a pull if `update` is None. `placement_id`: the placement that the
        worker knows."""
        copy = self.copies.found.get(key)
        is_other = placement_id != self.registration.placement_id_of(key)
        if is_other or copy is None or not copy.takes_pushes or copy.epoch != epoch:
            answer("not here")
            return
        assert copy.placement_id == placement_id, (
            f"{key}: a push of placement {placement_id} to a copy of placement {copy.placement_id}"
        )

        def apply() -> None:
            if not copy.takes_pushes or copy.epoch != epoch:
                answer("not here")
                return
            version = copy.num_applied
            if update is not None:
                version = copy.sessions.get(update, 0)
                if not version:
                    version = copy.num_applied = copy.add(update)
                    self.copies.on_applied(copy)
                    self.post(ev.PushApplied(key, SimRecord(version, update)), copy)
            self._ask(token, copy, epoch, version, level=level, answer=answer)

        copy.lane.put(self.setting.chance.random() * 0.003, apply)

    def _ask(
        self, token: Any, copy: Copy, epoch: int, version: int, *, level: AckLevel, answer: Answer
    ) -> None:
        self.waiting[token] = copy.key, epoch, version, level, answer
        self.post(ev.AckRequested(token, copy.key, epoch, version, level), copy)

    def disk_taken(self) -> None:
        """Lose the disk to another process."""
        if self.disk is not None:
            self.has_lost_disk, self.disk = True, None
            self.process.act(0.0, self.disk_failed)

    def disk_failed(self) -> None:
        """Stop the journals of all shards that this server leads."""
        for key, copy in list(self.copies.found.items()):
            if copy.leads:
                self.post(ev.VersionJournaled(key, None))

    def create(self, key: Key, update: Update, placement_id: str) -> None:
        if placement_id == self.registration.placement_id_of(key):
            self.copies.create(key, update, self._records.get(key))

    def leave(self, within_s: float) -> None:
        """End in order, once the server holds nothing any more, or after `within_s`."""
        if not self.is_ending:
            self.registration.announce_leaving(leaving=True)
            self._look_whether_empty(self.process.now_s + within_s)

    def _look_whether_empty(self, give_up_s: float) -> None:
        others = any(each is not self for each in self.setting.servers.values())
        keeps = self.disk is not None and any(
            record.on_disk == self.me.server_id for record in self._records.values()
        )
        is_bare = not self.copies.found and not keeps
        if others and not is_bare and self.process.now_s < give_up_s:
            self.process.act(LOOK_EACH_S / 3, lambda: self._look_whether_empty(give_up_s))
            return
        self.is_ending = True
        self.setting.note(self.process.name, "ends in order")
        self.submit_event(ev.LeaseEnded())
        self.registration.end(self.die)

    def _acknowledge(self, effect: fx.AcknowledgeVersion) -> None:
        key, epoch, version, level, answer = self.waiting.pop(effect.token)
        copy = self.copies.found.get(key)
        assert copy is not None, f"{self.me} acknowledges {key}, and has nothing of it"
        self.setting.ledger.acknowledged(self.me, copy, epoch, version, level)
        answer("acknowledged")

    def _refuse(self, effect: fx.RefuseVersion) -> None:
        *_, answer = self.waiting.pop(effect.token)
        answer("no disk" if effect.why is fx.AckRefusalReason.NO_DISK else "refused")

    # --- records ---

    def record_received(self, item: KeyValue) -> None:
        if self.registration.note(item):
            self._known(*self.registration.newest(item))

    def registered(self) -> None:
        """Drop journals that are not needed; before the registration it is not known which."""
        for key, assignment in list(self._records.items()):
            self.copies.drop_unneeded_journal(key, assignment)

    def _known(self, key: Key, assignment: ShardAssignment) -> None:
        self.submit_event(ev.ShardAssigned(key, assignment, self.registration.placement_id_of(key)))
        if self.registration.was_registered:
            self.copies.drop_unneeded_journal(key, assignment)

    def _missing(self) -> list[Key]:
        """Return the shards that are missing on this server's disk according to the records; none
        if the disk was lost."""
        if not self.registration.was_registered or self.has_lost_disk:
            return []
        return [key for key, record in self._records.items() if self._is_missing(key, record)]

    def _is_missing(self, key: Key, record: ShardAssignment) -> bool:
        is_on_disk = key in self.recovered or (self.disk is not None and key in self.disk.shards)
        return record.on_disk == self.me.server_id and not is_on_disk

    def _disown(self, key: Key) -> None:
        """Write into the record that the shard is not on this server's disk."""

        def disowned(record: ShardAssignment) -> ShardAssignment:
            is_missing = self._is_missing(key, record)
            return self._disowning.wanted_record(record) if is_missing else record

        self.registration.change(
            key,
            disowned,
            self._known,
            lambda: None,
        )

    def _write(self, key: Key) -> None:
        def revised(record: ShardAssignment) -> ShardAssignment:
            self.submit_event(ev.ShardRecordRead(key, record))
            return self._revised.pop(key)

        self.registration.change(
            key, revised, self._known, lambda: self.submit_event(ev.ShardRecordWritten(key))
        )

    def _revise(self, effect: fx.ReviseShardRecord) -> None:
        self._revised[effect.key] = effect.assignment

    def _refresh(self, key: Key) -> None:
        def read(stored: Any) -> None:
            if stored is not None and self.registration.note_stored(key, stored):
                self._known(key, stored.assignment)
            self.submit_event(ev.ShardRecordRefreshed(key))

        self.registration.client.read(
            key, read, lambda is_unknown: self.submit_event(ev.ShardRecordRefreshed(key))
        )

    def _look_at_servers(self) -> None:
        """List the servers again and again after a restart, while the journal has shards that
        others may have too, or lacks shards that it should have."""

        asked_s = self.process.now_s

        def seen(present: frozenset[Holder], ended: frozenset[Holder]) -> None:
            known = ended | self.ended
            self.submit_event(ev.ServersListed(present, asked_s, known))
            missing = {key: self._records[key] for key in self._missing()}
            self._disowning.note_servers(
                missing.values(), present, known, asked_s=asked_s, now_s=self.process.now_s
            )
            for key, record in missing.items():
                if self._disowning.wanted_record(record) != record:
                    self._disown(key)
            self.process.act(LOOK_EACH_S, self._look_at_servers)

        if self.core.open_claims or self._missing():
            self.registration.read_servers(
                seen, lambda: self.process.act(RETRY_S, self._look_at_servers)
            )
        else:
            self.process.act(LOOK_EACH_S, self._look_at_servers)
