"""Servers, a coordinator, etcd and workers under faults of every kind, in virtual time."""

from collections.abc import Callable

from support.sim.replication.coordinator import SimCoordinator
from support.sim.replication.ledger import Ledger
from support.sim.replication.machine import Network, SimProcess
from support.sim.replication.server import SimServer
from support.sim.replication.setting import Setting
from support.sim.replication.shard import Copy, Disk, Update
from support.sim.replication.store import ETCD, SimStore
from support.sim.replication.workers import SimWorker
from support.sim.virtual_time import FOREVER_S, Clock

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent, mark_empty

JOB = "j"


class ReplicationWorld:
    def __init__(
        self,
        seed: int,
        *,
        num_servers: int,
        num_shards: int,
        copies: int,
        num_workers: int = 2,
        think_s: float = 0.5,
        journals: bool = True,
        lease_ttl_s: float = 2.0,
        replays_history: bool = False,
    ) -> None:
        self.clock = Clock(seed)
        self.random = self.clock.random
        self.network = Network(self.clock)
        self.store = SimStore(self.clock, self.network)
        self.store.replays_history = replays_history
        disks: dict[str, Disk] = {}
        self.ledger = Ledger(self.clock, self.store.records, disks, self._copy_of)
        self.setting = Setting(
            self.clock,
            self.network,
            self.store,
            self.ledger,
            lease_ttl_s=lease_ttl_s,
            disks=disks,
        )
        self.store.on_record = self._recorded
        self.ledger.may_be_dead = self._may_be_dead
        self.ledger.is_fenced = self._is_fenced
        self.ledger.unread = lambda holder, copy: self.setting.servers[holder].peers.unread(
            copy.key, copy.epoch
        )
        self.network.on_cut = self._troubled
        self.network.on_mend = self._mended
        self.copies = copies
        self.keys: list[Key] = [(JOB, shard_id) for shard_id in range(num_shards)]
        self.current: dict[str, SimServer] = {}
        """The newest process of each server."""
        self.snapshot: dict[Key, tuple[Update, ...]] = {}
        """The newest snapshot, of every shard; empty if none was taken."""
        self._journals = journals
        self._num_starts = 0
        self._num_coordinators = 0
        for number in range(num_servers):
            self.start(f"s{number}")
        self.clock.run(0.5)
        for shard_id, key in enumerate(self.keys):
            primary = self.current[f"s{shard_id % num_servers}"].me
            self.store.place(key, ShardAssignment(shard_id=shard_id, epoch=1, primary=primary))
        self.coordinator = self._new_coordinator()
        self.workers = [
            SimWorker(self.setting, number, self.keys, think_s) for number in range(num_workers)
        ]

    # --- queries of checks ---

    def _copy_of(self, holder: Holder, key: Key) -> Copy | None:
        server = self.setting.servers.get(holder)
        alive = server is not None and server.process.alive
        return server.copies.found.get(key) if server is not None and alive else None

    def _away_s(self, holder: Holder) -> float:
        """Return the time for which etcd has not listed the process."""
        listed_until_s = self.store.listed_until_s.get(holder, 0.0)
        return max(0.0, self.clock.now_s - listed_until_s)

    def _may_be_dead(self, holder: Holder) -> bool:
        server = self.setting.servers[holder]
        # Some slack for clocks that run 1 % fast.
        return (not server.process.alive or server.is_ending) or (
            self._away_s(holder) >= 0.98 * self.setting.limits.dead_after_s
        )

    def _is_fenced(self, holder: Holder) -> bool:
        is_ending = self.setting.servers[holder].is_ending
        return is_ending or self._away_s(holder) >= 0.98 * self.setting.limits.dead_after_s

    def _recorded(self, key: Key, old: ShardAssignment | None, new: ShardAssignment) -> None:
        self.setting.note(ETCD, new)
        self.ledger.placement_id = self.store.placement_id
        self.ledger.recorded(key, old, new)

    # --- processes ---

    @property
    def living(self) -> list[SimServer]:
        """The newest running process of each server."""
        newest = {
            holder.server_id: server
            for holder, server in self.setting.servers.items()
            if server.process.alive
        }
        return [server for _, server in sorted(newest.items())]

    def start(self, server_id: str, *, is_replacement: bool = False) -> SimServer:
        """Start a new process of the server, with its disk. `is_replacement`: the last process may
        still run, on an unreachable machine whose disk was moved."""
        self._num_starts += 1
        before = self.current.get(server_id)
        ended: set[Holder] = set()
        if before is not None and is_replacement:
            before.disk_taken()
        elif before is not None:
            before.die()
            ended = {
                holder
                for holder, server in self.setting.servers.items()
                if holder.server_id == server_id and not server.process.alive
            }
        me = Holder(server_id, str(self._num_starts))
        disk = None
        if self._journals:
            disk = self.setting.disks.setdefault(server_id, Disk(server_id))
        self.setting.note(server_id, f"starts as {me.incarnation}")
        server = SimServer(self.setting, me, disk, frozenset(ended))
        self.current[server_id] = self.setting.servers[me] = server
        server.start()
        return server

    def kill(self, server: SimServer) -> None:
        self.setting.note(server.process.name, "is killed")
        server.die()

    def wipe(self, server_id: str) -> None:
        """Lose the server's disk; its next process has an empty one."""
        self.setting.note(server_id, "loses its disk")
        disk = self.setting.disks.pop(server_id, None)
        if disk is not None:
            disk.shards.clear()
        self.ledger.disk_lost(server_id)

    def save_disk(self, server_id: str) -> None:
        """Copy the server's disk, for `roll_back`."""
        disk = self.setting.disks.get(server_id)
        if disk is not None:
            self.setting.note(server_id, "has its disk copied")
            disk.saved = dict(disk.shards)

    def roll_back(self, server_id: str) -> None:
        """Replace the server's disk by its older copy, for its next process."""
        disk = self.setting.disks.get(server_id)
        if disk is not None and disk.saved:
            self.setting.note(server_id, "gets an older copy of its disk")
            disk.shards = dict(disk.saved)
            self.ledger.disk_lost(server_id)

    def begin_anew(self) -> None:
        """Delete the job's records in etcd, and place its shards again."""
        self.setting.note("operator", "begins the job anew")
        present = [server.me for server in self.living]
        fresh = {}
        for shard_id, key in enumerate(self.keys):
            primary = self.random.choice(present)
            fresh[key] = ShardAssignment(shard_id=shard_id, epoch=1, primary=primary)
        self.store.begin_anew(fresh)

    def take_snapshot(self) -> None:
        """Take a snapshot of each primary's applied updates, if every shard has a primary."""
        copies = {key: self._copy_of(self.store.records[key].primary, key) for key in self.keys}
        led = {key: c for key, c in copies.items() if c is not None and c.takes_pushes}
        if len(led) == len(self.keys):
            self.setting.note("operator", "takes a snapshot")
            self.snapshot = {key: tuple(c.updates[: c.num_applied]) for key, c in led.items()}

    def restore(self) -> None:
        """Restore the job from the newest snapshot."""
        if not self.snapshot:
            self.take_snapshot()
        if self.snapshot:
            self.setting.note("operator", "restores the job")
            self.coordinator.restore(self.snapshot)

    def pause(self, process: SimProcess, for_s: float) -> None:
        if process.paused_since_s is not None or not process.alive:
            return
        self.setting.note(process.name, f"is paused for {for_s:.2f} s")
        process.pause()
        self._troubled()
        since_s = process.paused_since_s
        self.clock.later(
            for_s, lambda: self._wake(process) if process.paused_since_s == since_s else None
        )

    def _wake(self, process: SimProcess) -> None:
        if process.paused_since_s is not None:
            self.setting.note(process.name, "goes on")
            process.wake()

    def cut(self, one: str, other: str, for_s: float) -> None:
        self.setting.note("network", f"{one} and {other} are cut off for {for_s:.2f} s")
        self.network.cut(one, other)
        since_s = self.network.cut_since_s(one, other)

        def mend() -> None:
            if self.network.cut_since_s(one, other) == since_s:
                self.setting.note("network", f"{one} and {other} reach each other")
                self.network.mend(one, other)

        self.clock.later(for_s, mend)

    def _troubled(self) -> None:
        for server in self.current.values():
            for link in server.peers.links:
                link.troubled()

    def _mended(self) -> None:
        self.store.mended()
        for link in {link for s in self.setting.servers.values() for link in s.peers.links}:
            link.mended()

    def stop_etcd(self, for_s: float) -> None:
        self.setting.note(ETCD, f"is away for {for_s:.2f} s")
        self.store.back_s = max(self.store.back_s, self.clock.now_s + for_s)

    def _new_coordinator(self) -> SimCoordinator:
        self._num_coordinators += 1
        return SimCoordinator(self.setting, f"coordinator#{self._num_coordinators}", self.copies)

    def replace_coordinator(self, *, kill: bool) -> None:
        """Start a new coordinator. The old one is killed, or runs on until it notices."""
        self.setting.note(self.coordinator.process.name, "is replaced")
        old = self.coordinator.process
        if kill:
            old.die()
        else:
            self.clock.later(self.random.random() * 3.0, old.die)
        self.coordinator = self._new_coordinator()

    # --- the end ---

    def calm(self, *, accepts_loss: bool) -> None:
        """Stop all faults, and restart every server that has ended."""
        self.setting.note("world", "all faults stop")
        self.store.loses_answers = False
        self.network.mend_all()
        self.setting.full.clear()
        self.setting.slow_s = 0.0
        for process in [
            self.coordinator.process,
            *(server.process for server in self.setting.servers.values()),
        ]:
            self._wake(process)
        for disk in self.setting.disks.values():
            disk.fails = False
        for server in list(self.setting.servers.values()):
            if server.has_lost_disk and server.process.alive:
                # An operator restarts it.
                self.kill(server)
        for server_id in sorted(self.current.keys() - {s.me.server_id for s in self.living}):
            self.start(server_id)
        for server in list(self.setting.servers.values()):
            if server.process.alive and server.registration.is_leaving:
                server.registration.announce_leaving(leaving=False)
        for worker in self.workers:
            worker.timeout_s = FOREVER_S
        if accepts_loss:
            self.clock.later(3 * self.setting.limits.dead_after_s, self._accept_losses)

    def _accept_losses(self) -> None:
        for key, record in list(self.store.records.items()):
            if record.content is ShardContent.LOST:
                self.setting.note("operator", f"gives up {key}")
                self.ledger.given_up(key)
                self.store.place(key, mark_empty(record, record.primary))

    def run(self, for_s: float, until: Callable[[], bool] | None = None) -> bool:
        end_s = self.clock.now_s + for_s
        while self.clock.now_s < end_s:
            if until is not None and until():
                return True
            self.clock.run(min(end_s, self.clock.now_s + 0.5) if until else end_s)
        return until is None or until()

    def unrest(self) -> str:
        """Describe what is not at rest yet after all faults have stopped; empty if nothing is."""
        living = [s.me for s in self.setting.servers.values() if s.process.alive]
        if len(living) > len(self.living):
            return f"one of {living} has not noticed that another process has its id"
        for key in self.keys:
            record = self.store.records[key]
            if record.content is ShardContent.LOST:
                continue
            server = self.setting.servers[record.primary]
            copy = server.copies.found.get(key)
            if not server.process.alive:
                return f"{key} has no primary: {record}"
            is_of_it = copy is not None and (copy.placement_id, copy.epoch) == (
                self.store.placement_id,
                record.epoch,
            )
            if copy is None or not copy.takes_pushes or not is_of_it:
                return f"{key} is not led: {record}, {copy}"
            wanted = min(self.copies, len(self.living))
            if len(record.holders) != wanted or record.joining or record.successor:
                return f"{key} has not its {wanted} copies: {record}"
            for backup in record.backups:
                held = self._copy_of(backup, key)
                if held is None or (held.placement_id, held.epoch) != (
                    self.store.placement_id,
                    record.epoch,
                ):
                    return f"{key} has no copy at {backup}: {record}"
        return ""

    def lost(self) -> set[Key]:
        return {k for k, r in self.store.records.items() if r.content is ShardContent.LOST}

    def unanswered(self) -> list[object]:
        lost = self.lost()
        return [c for worker in self.workers for k, c in worker.open.items() if k not in lost]
