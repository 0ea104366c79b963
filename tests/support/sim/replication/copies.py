"""The shards of one server process: applied pushes, replayed updates, images, and its journal."""

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from support.sim.replication.machine import Lane
from support.sim.replication.setting import Setting
from support.sim.replication.shard import (
    ArrivingImage,
    Copy,
    Image,
    OnDiskCopy,
    SimRecord,
    Update,
)

from shoal_server.core.replication.protocol import effects as fx
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.messages import (
    ImageChunk,
    ImageStart,
    Key,
    UpdateMessage,
)
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    may_be_put_on_disk,
)

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

FLUSH_S = 0.05
USUAL_S = 0.004
LONG_REPLAY_S = 15.0


class ServerCopies:
    def __init__(self, server: "SimServer", setting: Setting) -> None:
        self._server = server
        self._setting = setting
        self._chance = setting.chance
        self.found: dict[Key, Copy] = {}
        self.images: dict[int, Image] = {}
        """Images in transfer to other servers."""
        self._arriving: dict[tuple[Key, int], ArrivingImage] = {}
        self._arriving_lanes: dict[tuple[Key, int], Lane] = {}
        self._flushing: set[Key] = set()
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            fx.LeadShard: self._lead,
            fx.OpenShard: self._open,
            fx.StopPushes: self._stop,
            fx.ResumePushes: self._resume,
            fx.StepDown: self._step_down,
            fx.DropShard: lambda effect: self._drop(effect.key),
            fx.SettleCopy: self._settle_last,
            fx.SetFollowers: lambda effect: None,
            fx.SetUnreplicated: lambda effect: None,
            fx.MakeImage: self._make_image,
            fx.ReleaseChunks: lambda effect: None,
            fx.CloseImage: lambda effect: self.images.pop(effect.image, None),
            fx.AcceptRequest: self._accept,
            fx.AdoptImage: self._adopt,
            fx.DropImage: lambda effect: self._arriving.pop((effect.key, effect.image), None),
            fx.EnterEpoch: self._enter_epoch,
            fx.LoadJournal: self._load_journal,
        }

    def _takes_s(self, *, long: bool = False, longest_s: float = inf) -> float:
        usual_s = self._chance.random() * USUAL_S
        slow_s = min(self._setting.slow_s, longest_s)
        return usual_s + self._chance.random() * slow_s if long else usual_s

    def _new(self, key: Key, epoch: int) -> Copy:
        placement_id = self._server.registration.placement_id_of(key)
        return Copy(key, placement_id, epoch, Lane(self._server.process))

    # --- leading ---

    def load(
        self,
        key: Key,
        epoch: int,
        placement_id: str,
        updates: tuple[Update, ...],
        *,
        on_loaded: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        """Load the shard from a snapshot.

        The values are discarded if the shard is no longer this server's, or no longer wanted, when
        loading ends.
        """

        def loaded() -> None:
            record = self._server.registration.records.get(key)
            if (
                not is_wanted()
                or record is None
                or self._server.registration.placement_id_of(key) != placement_id
                or (record.primary, record.epoch) != (self._server.me, epoch)
                or key in self.found
            ):
                return
            copy = self.found[key] = self._new(key, epoch)
            copy.fill(updates)
            self._setting.ledger.loaded(copy)
            self._server.submit_event(ev.ShardCreated(key, epoch, copy.version))
            on_loaded()

        self._server.process.act(self._takes_s(long=True), loaded)

    def create(self, key: Key, update: Update, record: ShardAssignment | None) -> None:
        """Set initial values if the shard has none, as far as this server knows."""
        if (
            record is None
            or record.primary != self._server.me
            or record.content is not ShardContent.NONE
            or key in self.found
        ):
            return
        copy = self.found[key] = self._new(key, record.epoch)
        copy.fill([update])
        self._server.submit_event(ev.ShardCreated(key, record.epoch, copy.version))

    def _lead(self, effect: fx.LeadShard) -> None:
        copy = self.found[effect.key]
        assert copy.num_applied == copy.version, f"{effect.key} is led before it has settled"
        copy.epoch, copy.leads = effect.epoch, True
        copy.is_open = copy.is_stopped = False
        self._setting.ledger.leads(self._server.me, copy)
        self._flush_later(copy)

    def _open(self, effect: fx.OpenShard) -> None:
        copy = self.found[effect.key]
        copy.is_open = True
        self._setting.ledger.opened(copy)

    def _stop(self, effect: fx.StopPushes) -> None:
        copy = self.found[effect.key]

        def stop() -> None:
            copy.is_stopped = True
            if not copy.is_dropped and copy.leads:
                self._server.post(ev.PushesStopped(copy.key, copy.version))

        copy.lane.put(self._takes_s(), stop)

    def _resume(self, effect: fx.ResumePushes) -> None:
        copy = self.found[effect.key]
        copy.lane.put(self._takes_s(), lambda: setattr(copy, "is_stopped", False))

    def _step_down(self, effect: fx.StepDown) -> None:
        copy = self.found[effect.key]
        copy.leads = False
        self._setting.ledger.leads_no_longer(copy)
        self._settle(copy)

    def _drop(self, key: Key) -> None:
        copy = self.found.pop(key, None)
        if copy is not None:
            copy.is_dropped = True
            if copy.leads:
                self._setting.ledger.leads_no_longer(copy)
            copy.leads = False

    # --- following ---

    def _settle_last(self, effect: fx.SettleCopy) -> None:
        copy, last = self.found[effect.key], effect.last

        def read_to_end() -> None:
            if last is not None:
                self._server.peers.read_to_end(last)
            if not copy.is_dropped:
                self._settle(copy)

        self._server.process.act(self._takes_s(), read_to_end)

    def _settle(self, copy: Copy) -> None:
        def settled() -> None:
            if not copy.is_dropped:
                self._server.post(ev.CopySettled(copy.key, copy.num_applied))

        copy.lane.put(self._takes_s(long=True), settled)

    def _accept(self, effect: fx.AcceptRequest) -> None:
        request, data = effect.request, effect.data
        if isinstance(request, UpdateMessage):
            assert isinstance(data, SimRecord) and data.version == request.version, effect
            self._replay(request.key, data)
        elif isinstance(request, ImageStart):
            self._begin_image(request)
        else:
            assert isinstance(data, tuple), effect
            self._store_chunk(request, data)

    def _replay(self, key: Key, record: SimRecord) -> None:
        copy = self.found.get(key)
        assert copy is not None, f"{key} is replayed into nothing"
        assert copy.version + 1 == record.version, f"{key}: {record} on {copy.version}"
        copy.add(record.update)
        self._setting.ledger.follows(self._server.me, copy)

        def apply() -> None:
            if copy.is_dropped:
                return
            copy.num_applied += 1
            if self._setting.copies_fail and self._chance.random() < self._setting.copies_fail:
                self._server.post(ev.CopyFailed(copy.key), copy)

        # Only a few take long, as many replays may wait for each other.
        is_long = self._chance.random() < 0.1
        copy.lane.put(self._takes_s(long=is_long, longest_s=LONG_REPLAY_S), apply)

    def _enter_epoch(self, effect: fx.EnterEpoch) -> None:
        copy = self.found[effect.key]
        copy.epoch = effect.epoch
        self._setting.ledger.follows(self._server.me, copy)

    # --- images ---

    def _make_image(self, effect: fx.MakeImage) -> None:
        copy = self.found[effect.key]

        def cut() -> None:
            if copy.is_dropped or self._chance.random() < 0.005:
                self._server.post(ev.ImageNotMade(copy.key, effect.image, "no memory"))
                return
            num_chunks = self._chance.randint(1, 12)
            updates = tuple(copy.updates[: copy.num_applied])
            self.images[effect.image] = Image(copy.key, updates, num_chunks)
            self._server.post(ev.ImageMade(copy.key, effect.image, len(updates), num_chunks))

        copy.lane.put(self._takes_s(long=True), cut)

    def _begin_image(self, start: ImageStart) -> None:
        if self._server.me.server_id in self._setting.full:
            failed = ev.ImageFailed(start.key, start.image, True, "no memory")
            self._server.process.act(self._takes_s(), lambda: self._server.submit_event(failed))
            return
        place = start.key, start.image
        self._arriving[place] = ArrivingImage(start.placement_id, start.num_chunks, start.version)
        self._arriving_lanes[place] = Lane(self._server.process)

    def _store_chunk(self, chunk: ImageChunk, data: tuple[Update, ...]) -> None:
        place = chunk.key, chunk.image
        image = self._arriving.get(place)
        if image is None:
            return  # There was no memory for the image, and the failure is being reported.
        image.chunks[chunk.index] = data

        def stored() -> None:
            if self._arriving.get(place) is image:
                self._server.submit_event(ev.ChunkStored(chunk.key, chunk.image, chunk.index))
                image.num_stored += 1
                if image.num_stored == image.num_chunks:
                    self._arriving_lanes[place].put(self._takes_s(long=True), restored)

        def restored() -> None:
            if self._arriving.get(place) is image:
                image.is_restored = True
                self._server.submit_event(ev.ImageRestored(chunk.key, chunk.image))

        self._arriving_lanes[place].put(self._takes_s(), stored)

    def _adopt(self, effect: fx.AdoptImage) -> None:
        image = self._arriving.pop((effect.key, effect.image))
        assert image.is_restored, f"{effect} of what has not been restored"
        before = self.found.get(effect.key)
        assert before is None or not before.leads, f"{effect} over what is led here"
        self._drop(effect.key)
        copy = self.found[effect.key] = self._new(effect.key, effect.epoch)
        assert copy.placement_id == image.placement_id, (
            f"{effect} of placement {image.placement_id}, not {copy.placement_id}"
        )
        copy.fill(image.updates)
        assert copy.version == effect.version, f"{effect} of version {copy.version}"
        self._setting.ledger.follows(self._server.me, copy)

    def is_restoring(self, key: Key) -> bool:
        """True if a complete image is being restored."""
        return any(
            place[0] == key and image.num_stored == image.num_chunks and not image.is_restored
            for place, image in self._arriving.items()
        )

    # --- the journal ---

    def on_applied(self, copy: Copy) -> None:
        self._flush_later(copy)

    def _flush_later(self, copy: Copy) -> None:
        if not self._server.core.leading.keeps_journal or copy.key in self._flushing:
            return
        self._flushing.add(copy.key)

        def flush() -> None:
            self._flushing.discard(copy.key)
            disk = self._server.disk
            if copy.is_dropped or not copy.leads:
                return
            if disk is None or disk.fails:
                self._server.post(ev.VersionJournaled(copy.key, None))
                return
            version = copy.num_applied
            chain = tuple(copy.chain[: version + 1])
            disk.shards[copy.key] = OnDiskCopy(
                copy.placement_id, copy.epoch, tuple(copy.updates[:version]), chain
            )
            self._server.post(ev.VersionJournaled(copy.key, version), copy)

        self._server.process.act(self._chance.random() * FLUSH_S, flush)

    def drop_unneeded_journal(self, key: Key, record: ShardAssignment) -> None:
        """Drop the journal of a shard whose record names another disk or none, unless this server
        leads the shard."""
        disk, copy = self._server.disk, self.found.get(key)
        leads = copy is not None and copy.leads
        if not may_be_put_on_disk(record, self._server.me) and not leads:
            if disk is not None:
                disk.shards.pop(key, None)
            self._server.recovered.pop(key, None)

    def _load_journal(self, effect: fx.LoadJournal) -> None:
        key = effect.key

        def load() -> None:
            disk = self._server.disk
            kept = (self._server.recovered if disk is None else disk.shards).get(key)
            if key in self.found:
                return
            if kept is None:
                self._server.submit_event(ev.JournalShardMissing(key, effect.epoch))
                return
            copy = self.found[key] = self._new(key, effect.epoch)
            assert copy.placement_id == kept.placement_id, (
                f"{effect} of placement {kept.placement_id}, not {copy.placement_id}"
            )
            copy.fill(kept.updates)
            self._server.submit_event(ev.ShardCreated(key, effect.epoch, copy.version))

        self._server.process.act(self._takes_s(long=True), load)
