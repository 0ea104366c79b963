"""The coordinator's work on shards: the real decisions between simulated reads and writes."""

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from support.clusters.memory_store import MemoryStore
from support.sim.replication.machine import SimProcess
from support.sim.replication.registration import read_servers
from support.sim.replication.setting import Setting
from support.sim.replication.shard import Update
from support.sim.replication.store import StoreClient, Stored, decode, key_of

from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.abandoned_loads import AbandonedLoads
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.losses import after_failed_restore
from shoal_server.core.shards.observed_servers import ObservedServers
from shoal_server.core.shards.rebalance import Servers, rebalance
from shoal_server.etcd import keys

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

LOOKS_EACH_S = 0.7
LOADED_WITHIN_S = 90.0


class SimCoordinator:
    """A coordinator's process. A later process knows nothing of what this one observed."""

    def __init__(self, setting: Setting, name: str, copies: int) -> None:
        self.process = SimProcess(setting.clock, name)
        self._setting = setting
        self._copies = copies
        self._client = StoreClient(setting.store, self.process)
        self._sightings = ObservedServers(setting.limits.dead_after_s, setting.limits.longest_gap_s)
        self._placement_id = ""
        self._loads = AbandonedLoads()
        self._restoring = ""
        """The placement of the job whose shards are being loaded; empty if none is."""
        self.process.act(0.01, self._look)

    # --- restoring ---

    def restore(self, snapshot: Mapping[Key, tuple[Update, ...]]) -> None:
        """Begin another placement, whose shards the listed servers load from a snapshot."""

        def begin() -> None:
            servers = [
                server
                for server in self._setting.servers.values()
                if server.process.alive and server.me.server_id in self._setting.store.listed()
            ]
            if servers and not self._setting.store.is_away:
                self._begin_restoring(servers, snapshot)

        self.process.act(0.0, begin)

    def _begin_restoring(
        self, servers: "Sequence[SimServer]", snapshot: Mapping[Key, tuple[Update, ...]]
    ) -> None:
        setting, store = self._setting, self._setting.store
        before = dict(store.records)
        chosen = {key: setting.chance.choice(servers) for key in snapshot}
        wanted = {
            key: ShardAssignment(
                shard_id=key[1],
                epoch=before[key].epoch + 1,
                primary=server.me,
                content=ShardContent.LOADING,
            )
            for key, server in chosen.items()
        }
        store.begin_anew(wanted)
        placement_id = self._restoring = store.placement_id
        waits = set(snapshot)

        def load(key: Key, server: "SimServer") -> None:
            epoch = store.records[key].epoch
            name = server.process.name

            def arrive() -> None:
                if not setting.network.is_cut(self.process.name, name):
                    server.process.do(
                        lambda: server.copies.load(
                            key,
                            epoch,
                            placement_id,
                            snapshot[key],
                            on_loaded=lambda: waits.discard(key),
                            is_wanted=lambda: self.process.alive,
                        )
                    )

            # Late enough that the server knows the record that names it.
            setting.clock.later(0.5 + setting.network.delay_s(self.process.name, name), arrive)

        for key, server in chosen.items():
            load(key, server)
        give_up_s = self.process.now_s + LOADED_WITHIN_S

        def look() -> None:
            if self._has_ended(placement_id, waits):
                return
            failed = any(not chosen[key].process.alive for key in waits)
            if (failed or self.process.now_s >= give_up_s) and not store.is_away:
                self._call_lost(before, wanted)
            else:
                self.process.act(LOOKS_EACH_S, look)

        self.process.act(LOOKS_EACH_S, look)

    def _has_ended(self, placement_id: str, waits: Set[Key]) -> bool:
        ended = self._setting.store.placement_id != placement_id or not waits
        if ended:
            self._restoring = ""
        return ended

    def _call_lost(
        self, before: Mapping[Key, ShardAssignment], wanted: Mapping[Key, ShardAssignment]
    ) -> None:
        self._setting.note(self.process.name, "cannot restore the job")
        self._restoring = ""
        lost = after_failed_restore(_of_job(before), _of_job(wanted), "", 1.0)
        self._setting.store.begin_anew({("j", shard.shard_id): shard for shard in lost.shards})

    # --- looking after shards ---

    def _look_later(self) -> None:
        self.process.act(LOOKS_EACH_S * (0.5 + self._setting.chance.random()), self._look)

    def _look(self) -> None:
        async def records(memory: MemoryStore) -> dict[Key, Stored]:
            found = await memory.range(keys.ASSIGNMENTS)
            return {key_of(item.key): decode(item) for item in found.items}

        def again(_: bool) -> None:
            self._look_later()

        asked_s = self.process.now_s
        self._client.ask(
            records,
            lambda stored: self._client.ask(
                read_servers, lambda seen: self._decide(stored, seen, asked_s), again
            ),
            again,
        )

    def _decide(self, stored: dict[Key, Stored], seen: Servers, asked_s: float) -> None:
        ordered = sorted(stored)
        placement_id = stored[ordered[0]].placement_id
        if placement_id != self._placement_id:
            limits = self._setting.limits
            self._placement_id = placement_id
            self._sightings = ObservedServers(limits.dead_after_s, limits.longest_gap_s)
            self._loads = AbandonedLoads()
        before = JobAssignments(
            job="j", copies=self._copies, shards=tuple(stored[key].assignment for key in ordered)
        )
        judged = self._sightings.judged(before, seen, asked_s=asked_s, now_s=self.process.now_s)
        known = self._loads.mark_lost(
            before, is_restoring=self._restoring == placement_id, now_s=self.process.now_s
        )
        after = rebalance(before, judged, {}) if known == before else known
        self._sightings.note_written(after, after)
        waits = 1

        def ended() -> None:
            nonlocal waits
            waits -= 1
            if not waits:
                self._look_later()

        for key, new in zip(ordered, after.shards, strict=True):
            if new != stored[key].assignment:
                waits += 1
                self._setting.note(self.process.name, f"wants {new}")
                self._client.replace(
                    key, new, stored[key], lambda made, stands: ended(), lambda unknown: ended()
                )
        ended()


def _of_job(records: Mapping[Key, ShardAssignment]) -> JobAssignments:
    return JobAssignments(job="j", copies=1, shards=tuple(records[key] for key in sorted(records)))
