"""A seeded run of replication: faults of every kind, then a time without faults."""

import random
import traceback
from collections.abc import Sequence

from support.sim.replication.links import SILENCE_S
from support.sim.replication.server import SimServer
from support.sim.replication.store import ETCD
from support.sim.replication.world import ReplicationWorld

from shoal_server.core.processes import Holder

DURATIONS_S = (0.3, 0.3, 1.0, 3.0, 3.0, 6.0, 12.0, 20.0)
FAULTS = (
    ["kill", "restart", "cut peers", "pause"] * 4
    + ["cut from etcd", "cut from worker", "isolate", "drain", "slow"] * 2
    + ["cut all from etcd", "kill all", "etcd", "coordinator", "pause coordinator", "wipe"]
    + ["cut coordinator", "full", "replace", "disk", "newcomer", "old pair"]
    + ["replace", "lag", "slow", "leave", "save disk", "roll back"] * 2
    + ["anew", "away twice", "deposed without notice", "kill sender"]
    + ["snapshot", "restore", "kill restorer", "kill loader"]
)
FAILING = [*FAULTS, *["copies fail", "kill what failed"] * 5, *["joiner left out"] * 3]
"""Faults of one in five seeds."""
STORY_LINES = 250


class Faults:
    """Faults, drawn from a separate seed."""

    def __init__(self, world: ReplicationWorld, seed: int, only: Sequence[str]) -> None:
        self._world = world
        fails = random.Random(f"failing {seed}").random() < 0.2
        self._names = only or (FAILING if fails else FAULTS)
        self._chance = random.Random(f"faults {seed}")
        self._newcomers = 0

    def strike(self) -> None:
        """Cause one random fault, or the arrival of a server."""
        name = self._chance.choice(self._names).replace(" ", "_")
        living = self._world.living
        if not living:
            name = "restart"
        strike = getattr(self, f"_{name}")
        strike(self._chance.choice(living) if living else None)

    def _for_s(self) -> float:
        return self._chance.choice(DURATIONS_S) * (0.8 + 0.4 * self._chance.random())

    def _kill(self, server: SimServer) -> None:
        self._world.kill(server)
        if self._chance.random() < 0.5:
            server_id = server.me.server_id
            self._world.clock.later(self._for_s(), lambda: self._start(server_id))

    def _start(self, server_id: str) -> None:
        if not self._world.current[server_id].process.alive:
            self._world.start(server_id)

    def _restart(self, server: SimServer | None) -> None:
        dead = [i for i, s in sorted(self._world.current.items()) if not s.process.alive]
        if dead:
            self._world.start(self._chance.choice(dead))
        elif server is not None:
            self._world.kill(server)
            self._world.start(server.me.server_id)

    def _kill_all(self, server: SimServer) -> None:
        for each in self._world.living:
            self._world.kill(each)
            server_id = each.me.server_id
            if self._chance.random() < 0.8:
                self._world.clock.later(self._for_s(), lambda i=server_id: self._start(i))

    def _wipe(self, server: SimServer) -> None:
        self._world.kill(server)
        self._world.wipe(server.me.server_id)
        self._world.clock.later(self._for_s(), lambda: self._start(server.me.server_id))

    def _replace(self, server: SimServer) -> None:
        """Cut the server off from all but workers, and start another process with the same id and
        disk."""
        world, old = self._world, server.process.name
        for_s = self._for_s() + 3.0
        self._cut_off(server, for_s)
        fresh = world.start(server.me.server_id, is_replacement=True)
        world.cut(old, fresh.process.name, for_s)

    def _cut_off(self, server: SimServer, for_s: float) -> None:
        world, name = self._world, server.process.name
        for other in world.living:
            if other is not server:
                world.cut(name, other.process.name, for_s)
        world.cut(name, ETCD, for_s)

    def _isolate(self, server: SimServer) -> None:
        self._cut_off(server, self._for_s())

    def _pause(self, server: SimServer) -> None:
        self._world.pause(server.process, self._for_s())

    def _cut_peers(self, server: SimServer) -> None:
        others = [each for each in self._world.living if each is not server]
        if others:
            other = self._chance.choice(others)
            self._world.cut(server.process.name, other.process.name, self._for_s())

    def _cut_from_etcd(self, server: SimServer) -> None:
        self._world.cut(server.process.name, ETCD, self._for_s())

    def _old_pair(self, server: SimServer) -> None:
        """Cut all holders of one shard off from etcd alone."""
        for_s = self._for_s()
        for holder in self._holders():
            self._world.cut(holder, ETCD, for_s)

    def _holders(self) -> list[str]:
        """Return the holders of a random shard, the primary first."""
        record = self._world.store.records[self._chance.choice(self._world.keys)]
        return [f"{holder.server_id}#{holder.incarnation}" for holder in record.holders]

    def _away_twice(self, server: SimServer) -> None:
        """Cut all holders of one shard off from etcd twice, with a pause of the coordinator in
        between."""
        world, holders = self._world, self._holders()
        lease_s = world.setting.lease_ttl_s
        seen_s, paused_s = lease_s + 1.5, world.setting.limits.dead_after_s + 1.0

        def cut(for_s: float) -> None:
            for holder in holders:
                world.cut(holder, ETCD, for_s)

        cut(seen_s + 0.3)
        world.clock.later(seen_s, lambda: world.pause(world.coordinator.process, paused_s))
        again_s = seen_s + paused_s - lease_s - 0.5
        world.clock.later(again_s, lambda: cut(lease_s + 3.0))

    def _deposed_without_notice(self, server: SimServer) -> None:
        """Cut a primary off from all but workers while its backup takes over. Then a new
        coordinator, which does not know this, gives it shards before it learns of its
        succession."""
        world, (primary, *others) = self._world, self._holders()
        for_s = SILENCE_S + 2.0 + self._chance.random()
        for name in (ETCD, *others):
            world.cut(primary, name, for_s)
        replaced_s = for_s - self._chance.random()
        world.clock.later(replaced_s, lambda: world.replace_coordinator(kill=True))

    def _kill_sender(self, server: SimServer) -> None:
        """Kill a primary whose last backup lags. As soon as the backup restores an image, kill the
        sender of the image too."""
        world, (primary, *backups) = self._world, self._holders()
        world.setting.slow_s = 6.0
        if backups and self._chance.random() < 0.5:
            world.cut(primary, backups[-1], 1.5)
        elif backups:
            world.network.slow_down(primary, backups[-1], 0.6)
        give_up_s = world.clock.now_s + 12.0
        world.clock.later(1.0, lambda: self._kill_named(primary))

        def look() -> None:
            for key in world.keys:
                holder = world.store.records[key].primary
                others = (each for each in world.living if each.me != holder)
                if any(each.copies.is_restoring(key) for each in others):
                    self._kill(world.setting.servers[holder])
                    return
            if world.clock.now_s < give_up_s:
                world.clock.later(0.05, look)

        look()
        world.clock.later(12.0, lambda: setattr(world.setting, "slow_s", 0.0))

    def _joiner_left_out(self, server: SimServer) -> None:
        """Cut a joiner off from etcd while it receives a shard, so that the record no longer names
        it. Its primary, cut off too, learns of that earlier, later, or not at all."""
        world, (_, *backups) = self._world, self._holders()
        world.setting.slow_s = 20.0
        give_up_s = world.clock.now_s + 12.0
        if backups:
            self._kill_named(backups[0])
            self._start(backups[0].partition("#")[0])

        def look() -> None:
            for key in world.keys:
                record = world.store.records[key]
                if record.joining is not None:
                    self._cut_joiner_and_primary(record.joining, record.primary)
                    return
            if world.clock.now_s < give_up_s:
                world.clock.later(0.05, look)

        look()
        world.clock.later(20.0, lambda: setattr(world.setting, "slow_s", 0.0))

    def _cut_joiner_and_primary(self, joiner: Holder, primary: Holder) -> None:
        world, lease_s = self._world, self._world.setting.lease_ttl_s
        one, other = (f"{each.server_id}#{each.incarnation}" for each in (joiner, primary))
        world.cut(one, ETCD, lease_s + 2.0)
        # The primary's lease ends after the joiner's.
        for_s = 3.0 + 4.0 * self._chance.random()
        world.clock.later(lease_s - 1.0, lambda: world.cut(other, ETCD, for_s))

    def _kill_named(self, name: str) -> None:
        for each in self._world.living:
            if each.process.name == name:
                self._kill(each)

    def _cut_all_from_etcd(self, server: SimServer) -> None:
        for_s = self._for_s()
        for each in self._world.living:
            self._world.cut(each.process.name, ETCD, for_s)

    def _cut_from_worker(self, server: SimServer) -> None:
        worker = self._chance.choice(self._world.workers)
        self._world.cut(server.process.name, worker.name, self._for_s())

    def _etcd(self, server: SimServer) -> None:
        self._world.stop_etcd(self._for_s())

    def _coordinator(self, server: SimServer) -> None:
        self._world.replace_coordinator(kill=self._chance.random() < 0.5)

    def _pause_coordinator(self, server: SimServer) -> None:
        self._world.pause(self._world.coordinator.process, self._for_s())

    def _cut_coordinator(self, server: SimServer) -> None:
        self._world.cut(self._world.coordinator.process.name, ETCD, self._for_s())

    def _full(self, server: SimServer) -> None:
        full, server_id = self._world.setting.full, server.me.server_id
        self._world.setting.note(server_id, "has no memory for more copies")
        full.add(server_id)
        self._world.clock.later(self._for_s(), lambda: full.discard(server_id))

    def _slow(self, server: SimServer) -> None:
        setting = self._world.setting
        setting.slow_s = self._chance.choice([0.2, 1.0, 5.0, 15.0, 60.0])
        setting.note("world", f"copies take up to {setting.slow_s} s")
        self._world.clock.later(self._for_s(), lambda: setattr(setting, "slow_s", 0.0))

    def _copies_fail(self, server: SimServer) -> None:
        """Make updates of copies fail, or leave a wrong result."""
        setting = self._world.setting
        setting.copies_fail = self._chance.choice([0.05, 0.3, 1.0])
        setting.note("world", f"of updates to copies, {setting.copies_fail} fail")
        self._world.clock.later(self._for_s(), lambda: setattr(setting, "copies_fail", 0.0))

    def _kill_what_failed(self, server: SimServer) -> None:
        """Kill a primary while its copies fail, before it can record that it continues without
        them."""
        world, (primary, *_) = self._world, self._holders()
        self._copies_fail(server)
        world.cut(primary, ETCD, 3.0)
        world.clock.later(self._chance.random(), lambda: self._kill_named(primary))

    def _lag(self, server: SimServer) -> None:
        world = self._world
        other = self._chance.choice(
            [ETCD, *(each.process.name for each in world.living if each is not server)]
        )
        delay_s = self._chance.choice([0.05, 0.3, 1.0])
        world.setting.note("network", f"{server.process.name} and {other} are {delay_s} s apart")
        world.network.slow_down(server.process.name, other, delay_s)

    def _disk(self, server: SimServer) -> None:
        disk = server.disk
        if disk is None:
            return
        self._world.setting.note(server.me.server_id, "cannot write to its disk")
        disk.fails = True
        server.disk_failed()
        self._world.clock.later(self._for_s(), lambda: setattr(disk, "fails", False))

    def _drain(self, server: SimServer) -> None:
        leaving = not server.registration.is_leaving
        self._world.setting.note(server.process.name, f"leaving: {leaving}")
        server.registration.announce_leaving(leaving=leaving)

    def _leave(self, server: SimServer) -> None:
        server.leave(self._chance.choice([0.5, 4.0, 12.0]))
        server_id = server.me.server_id
        self._world.clock.later(self._for_s() + 1.0, lambda: self._start(server_id))

    def _save_disk(self, server: SimServer) -> None:
        self._world.save_disk(server.me.server_id)

    def _roll_back(self, server: SimServer) -> None:
        self._world.kill(server)
        self._world.roll_back(server.me.server_id)
        self._world.clock.later(self._for_s(), lambda: self._start(server.me.server_id))

    def _anew(self, server: SimServer) -> None:
        self._world.begin_anew()

    def _snapshot(self, server: SimServer) -> None:
        self._world.take_snapshot()

    def _restore(self, server: SimServer) -> None:
        self._world.restore()

    def _kill_restorer(self, server: SimServer) -> None:
        """Kill the coordinator while servers load the snapshot that it restores."""
        world = self._world
        world.setting.slow_s = 60.0
        world.restore()
        after_s = self._chance.choice([0.0, 0.3, 1.0, 5.0])
        world.clock.later(after_s, lambda: world.replace_coordinator(kill=True))
        world.clock.later(after_s + 1.0, lambda: setattr(world.setting, "slow_s", 0.0))

    def _kill_loader(self, server: SimServer) -> None:
        """Kill a server while it loads a shard from a snapshot."""

        def kill() -> None:
            self._world.kill(server)
            self._world.clock.later(1.0, lambda: self._start(server.me.server_id))

        self._world.restore()
        self._world.clock.later(0.4 + self._chance.random(), kill)

    def _newcomer(self, server: SimServer) -> None:
        if self._newcomers < 2:
            self._newcomers += 1
            self._world.start(f"n{self._newcomers}")


SLOWEST_S = 60.0


class Unforeseen(Exception):
    """An error that is not a violated invariant."""


def _run(world: ReplicationWorld, seed: int, only: Sequence[str]) -> None:
    chance = random.Random(f"times {seed}")
    faults = Faults(world, seed, only)
    world.run(chance.choice([0.5, 2.0, 4.0]))
    for _ in range(chance.randint(2, 9)):
        world.run(chance.choice([0.0, 0.02, 0.3, 1.0, 2.5, 5.0]) * (0.5 + chance.random()))
        faults.strike()
    world.run(chance.choice([0.0, 1.0, 4.0]))
    world.setting.copies_fail = 0.0
    world.calm(accepts_loss=chance.random() < 0.5)
    away_s = max(0.0, world.store.back_s - world.clock.now_s)
    world.run(away_s)
    # Loading a snapshot, a decision on assignments and restoring an image may take a minute each.
    bound_s = 5 * world.setting.limits.dead_after_s + 3 * SLOWEST_S
    rested = world.run(bound_s, until=lambda: not world.unrest())
    assert rested, f"not at rest: {world.unrest()}"
    for worker in world.workers:
        worker.pushes = False
    answered = world.run(40.0, until=lambda: not world.unanswered())
    assert answered, f"not answered: {world.unanswered()}"
    # Shards may still move to even out the load.
    world.run(1.0)
    rested = world.run(20.0 + 2 * SLOWEST_S, until=lambda: not world.unrest())
    assert rested, f"at rest no longer: {world.unrest()}"


def simulate_replication(seed: int, only: Sequence[str] = ()) -> ReplicationWorld:
    """Run one seed, with faults of all kinds or of the kinds in `only`.

    Raises AssertionError, or Unforeseen, with the log of the run.
    """
    chance = random.Random(f"sizes {seed}")
    world = ReplicationWorld(
        seed,
        num_servers=chance.choice([2, 3, 3, 4]),
        num_shards=chance.choice([1, 2, 2]),
        copies=chance.choice([1, 2, 2, 2, 3]),
        think_s=chance.choice([0.1, 0.4, 1.0]),
        journals=chance.random() < 0.6,
        lease_ttl_s=chance.choice([2.0, 6.0]),
        replays_history=random.Random(f"history {seed}").random() < 0.3,
    )
    try:
        _run(world, seed, only)
    except AssertionError as error:
        raise AssertionError(f"{error}\nseed {seed}\n{end_of_log(world)}") from error
    except Exception as error:
        text = f"{traceback.format_exc()}\nseed {seed}\n{end_of_log(world)}"
        raise Unforeseen(text) from error
    return world


def end_of_log(world: ReplicationWorld) -> str:
    """Return the end of the run's log: events and actions of servers, and faults, in order."""
    lines = world.setting.story[-STORY_LINES:]
    return "\n".join(f"{at_s:9.4f} {who:>14} {what}" for at_s, who, what in lines)
