"""A server's registration in etcd: its key under a lease, and its view and changes of records."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from support.clusters.memory_store import MemoryStore
from support.sim.replication.setting import Setting
from support.sim.replication.store import StoreClient, Stored, decode, key_of

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.rebalance import Servers
from shoal_server.etcd import keys
from shoal_server.etcd.api import NO_LEASE, Get, KeyValue, LeaseId, Put, absent
from shoal_server.etcd.records import ended_servers
from shoal_server.etcd.records.servers import parse

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

RETRY_S = 0.1
CLAIM_EACH_S = 0.5


async def read_servers(memory: MemoryStore) -> Servers:
    """Read the servers that etcd lists, and those that have ended."""
    items = (await memory.range(keys.SERVERS)).items
    found = [parse(item.key, item.value) for item in items]
    return Servers(
        present=frozenset(server.holder for server in found),
        leaving=frozenset(server.holder for server in found if server.is_leaving),
        dead=await ended_servers.read(memory),
    )


class ServerRegistration:
    def __init__(self, server: "SimServer", setting: Setting) -> None:
        self._server = server
        self._setting = setting
        self._process = server.process
        self._ttl_s = setting.lease_ttl_s
        self._lease = NO_LEASE
        self._refused_s = 0.0
        self.was_registered = False
        self.is_leaving = False
        self.client = StoreClient(setting.store, server.process)
        self.records: dict[Key, ShardAssignment] = {}
        self._stored: dict[Key, Stored] = {}

    # --- the key ---

    def register(self) -> None:
        """Register, retrying until it succeeds. If another process keeps the id for long, die."""

        async def grant(memory: MemoryStore) -> LeaseId:
            left_s = await memory.keep_alive(self._lease)
            return self._lease if left_s > 0.0 else await memory.grant(self._ttl_s)

        self.client.ask(grant, self._claim, lambda _: self._process.act(RETRY_S, self.register))

    def _claim(self, lease: LeaseId) -> None:
        self._lease = lease
        sent_s = self._process.now_s
        server, value = self._server, self._value()
        key = keys.server(server.me.server_id)

        async def work(memory: MemoryStore) -> bool:
            if await memory.keep_alive(lease) <= 0.0:
                return False
            result = await memory.transact([absent(key)], [Put(key, value, lease)], [Get(key)])
            # The key may be this process's already, if an earlier answer was lost.
            if not result.succeeded and all(item.lease != lease for item in result.reads[0]):
                return False
            for ended in server.ended:
                await ended_servers.note(memory, ended)
            self._listed()
            return True

        def answered(is_ours: bool) -> None:
            if is_ours:
                self._registered(sent_s)
                return
            self._refused_s += CLAIM_EACH_S
            if self._refused_s >= 3 * self._ttl_s:
                self._setting.note(self._process.name, "ends: another process has its id")
                server.die()
            else:
                self._process.act(CLAIM_EACH_S, self.register)

        self.client.ask(work, answered, lambda _: self._process.act(RETRY_S, self.register))

    def _registered(self, sent_s: float) -> None:
        self._refused_s = 0.0
        self._server.submit_event(ev.LeaseRenewed(sent_s))
        self._process.act(self._ttl_s / 3, self._renew)
        if not self.was_registered:
            self.was_registered = True
            self._server.registered()

    def _value(self) -> bytes:
        return json.dumps(
            {
                "address": self._process.name,
                "incarnation": self._server.me.incarnation,
                "leaving": self.is_leaving,
            }
        ).encode()

    def _listed(self) -> None:
        store = self._setting.store
        store.listed_until_s[self._server.me] = store.clock.now_s + self._ttl_s

    def _renew(self) -> None:
        sent_s, lease = self._process.now_s, self._lease

        async def work(memory: MemoryStore) -> float:
            left_s = await memory.keep_alive(lease)
            if left_s > 0.0:
                self._listed()
            return left_s

        def answered(left_s: float) -> None:
            if left_s > 0.0:
                self._server.submit_event(ev.LeaseRenewed(sent_s))
                self._process.act(self._ttl_s / 3, self._renew)
            else:
                self.register()

        self.client.ask(work, answered, lambda _: self._process.act(self._ttl_s / 3, self._renew))

    def end(self, ended: Callable[[], None]) -> None:
        """Record that this process ends, and delete its key."""
        key = keys.server(self._server.me.server_id)

        async def work(memory: MemoryStore) -> None:
            await ended_servers.note(memory, self._server.me)
            item = await memory.get(key)
            if item is not None and item.lease == self._lease:
                await memory.delete(key)

        self.client.ask(work, lambda outcome: ended(), lambda unknown: ended())

    def announce_leaving(self, *, leaving: bool) -> None:
        self.is_leaving = leaving
        key = keys.server(self._server.me.server_id)

        async def work(memory: MemoryStore) -> None:
            item = await memory.get(key)
            # Otherwise it is announced at registration; another process's key is not changed.
            if item is not None and item.lease == self._lease:
                await memory.put(key, self._value(), self._lease)

        def again(_: bool) -> None:
            self._process.act(RETRY_S, lambda: self.announce_leaving(leaving=self.is_leaving))

        self.client.ask(work, lambda outcome: None, again)

    def read_servers(
        self,
        seen: Callable[[frozenset[Holder], frozenset[Holder]], None],
        failed: Callable[[], None],
    ) -> None:
        """Read the registered servers, and those that have ended."""

        def answered(servers: Servers) -> None:
            seen(servers.present, servers.dead)

        self.client.ask(read_servers, answered, lambda _: failed())

    # --- records ---

    def note(self, item: KeyValue) -> bool:
        """Store an item; True if it is newer than the known one."""
        return self.note_stored(key_of(item.key), decode(item))

    def note_stored(self, key: Key, stored: Stored) -> bool:
        last = self._stored.get(key)
        if last is not None and stored.revision <= last.revision:
            return False
        self.records[key], self._stored[key] = stored.assignment, stored
        return True

    def placement_id_of(self, key: Key) -> str:
        """Return the placement of the job, as far as known here; empty if unknown."""
        stored = self._stored.get(key)
        return stored.placement_id if stored is not None else ""

    def newest(self, item: KeyValue) -> tuple[Key, ShardAssignment]:
        key = key_of(item.key)
        return key, self.records[key]

    def change(
        self,
        key: Key,
        revised: Callable[[ShardAssignment], ShardAssignment],
        known: Callable[[Key, ShardAssignment], None],
        finished: Callable[[], None],
    ) -> None:
        """Write until the record is as intended. After a write with an unknown outcome the current
        record is written once more, so that the former cannot be executed later."""

        placement_id = self.placement_id_of(key)

        def attempt(stored: Stored, may_be_made: bool) -> None:
            wanted = revised(stored.assignment)
            if stored.placement_id != placement_id or (
                wanted == stored.assignment and not may_be_made
            ):
                end(stored)
                return

            def answered(made: bool, stands: Stored | None) -> None:
                if stands is None:
                    # Another placement of the job has begun.
                    finished()
                elif made:
                    end(stands)
                else:
                    if self._setting.chance.random() < 0.5:
                        note_known(stands)
                    attempt(stands, may_be_made=False)

            def failed(is_unknown: bool) -> None:
                self._process.act(RETRY_S, lambda: read(may_be_made or is_unknown))

            self.client.replace(key, wanted, stored, answered, failed)

        def read(may_be_made: bool) -> None:
            def answered(stored: Stored | None) -> None:
                assert stored is not None, f"the record of {key} is gone"
                attempt(stored, may_be_made)

            def failed(_: bool) -> None:
                self._process.act(RETRY_S, lambda: read(may_be_made))

            self.client.read(key, answered, failed)

        def note_known(stored: Stored) -> None:
            if self.note_stored(key, stored):
                known(key, stored.assignment)

        def end(stored: Stored) -> None:
            note_known(stored)
            finished()

        attempt(self._stored[key], may_be_made=False)
