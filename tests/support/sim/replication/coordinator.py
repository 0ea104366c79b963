"""The coordinator's care for shards: the decisions that ship, between reading and writing etcd."""

from support.sim.replication.machine import SimProcess
from support.sim.replication.registration import read_servers
from support.sim.replication.setting import Setting
from support.sim.replication.store import StoreClient, Stored, decode, key_of

from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.core.shards.rebalance import Servers, rebalance
from shoal_server.core.shards.sightings import Sightings
from shoal_server.etcd import keys
from shoal_server.etcd.memory import MemoryStore

LOOKS_EACH_S = 0.7


class SimCoordinator:
    """One process. Another one that comes after it has seen nothing of what this one saw."""

    def __init__(self, setting: Setting, name: str, copies: int) -> None:
        self.process = SimProcess(setting.clock, name)
        self._setting = setting
        self._copies = copies
        self._client = StoreClient(setting.store, self.process)
        self._sightings = Sightings(setting.limits.dead_after_s, setting.limits.longest_gap_s)
        self._run = ""
        self.process.act(0.01, self._look)

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
        run = stored[ordered[0]].run
        if run != self._run:
            limits = self._setting.limits
            self._run = run
            self._sightings = Sightings(limits.dead_after_s, limits.longest_gap_s)
        before = JobAssignments(
            job="j", copies=self._copies, shards=tuple(stored[key].assignment for key in ordered)
        )
        judged = self._sightings.judged(before, seen, asked_s=asked_s, now_s=self.process.now_s)
        after = rebalance(before, judged, {})
        self._sightings.wrote(after, after)
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
