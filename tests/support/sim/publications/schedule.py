"""A seeded run of published weights: faults of every kind, then a time without faults."""

import random
import traceback
from collections.abc import Sequence

from support.sim.event_loop import LoopProcess
from support.sim.publications.coordinators import ask
from support.sim.publications.etcd import ETCD
from support.sim.publications.servers import SimServer
from support.sim.publications.shards import NUM_SHARDS
from support.sim.publications.world import PublicationWorld

from shoal_proto.errors import ShoalError
from shoal_proto.v1 import weights_pb2 as pb

DURATIONS_S = (0.5, 1.0, 3.0, 3.0, 8.0, 20.0, 40.0)
FAULTS = (
    ["kill server", "restart server", "pause server", "cut server", "cut server from etcd"] * 2
    + ["kill trainer", "replace trainer", "replace trainer", "pause trainer", "cut trainer"] * 2
    + ["slow trainer"]
    + ["replace script", "pause script"]
    + ["kill reader", "new reader", "pause reader", "cut reader", "slow reader"]
    + [
        "kill coordinator",
        "depose",
        "depose without notice",
        "pause coordinator",
        "cut coordinator",
    ]
    * 2
    + ["etcd", "pin", "unpin", "rollback", "rollback"]
)
OF_TABLES = ["kill worker", "kill worker", "pause worker", "cut worker", "move shard", "move shard"]
STORY_LINES = 120
RUN_S = 90.0
CALM_S = 400.0


class Faults:
    """Faults, drawn from a separate seed."""

    def __init__(self, world: PublicationWorld, seed: int, only: Sequence[str]) -> None:
        self._world = world
        self._names = only or [*FAULTS, *(OF_TABLES if world.workers else [])]
        self._chance = random.Random(f"faults {seed}")
        self._operator = LoopProcess(world.clock, "operator")

    def close(self) -> None:
        """End the operator's requests."""
        self._operator.close()

    def strike(self) -> None:
        """Cause one random fault."""
        getattr(self, f"_{self._chance.choice(self._names).replace(' ', '_')}")()

    def _for_s(self) -> float:
        return self._chance.choice(DURATIONS_S) * (0.8 + 0.4 * self._chance.random())

    def _server(self) -> SimServer:
        return self._chance.choice(list(self._world.servers.values()))

    def _kill_server(self) -> None:
        server = self._server()
        self._world.kill_server(server)
        self._world.clock.later(self._for_s(), lambda: self._revive(server.server_id))

    def _revive(self, server_id: str) -> None:
        if not self._world.servers[server_id].process.alive:
            self._world.start_server(server_id)

    def _restart_server(self) -> None:
        self._world.start_server(self._server().server_id)

    def _pause_server(self) -> None:
        self._world.pause(self._server().process, self._for_s())

    def _cut_server(self) -> None:
        one, other = self._server().process.name, self._any().name
        if one != other:
            self._world.cut(one, other, self._for_s())

    def _any(self) -> LoopProcess:
        return self._chance.choice([p for p in self._world.processes() if p.alive])

    def _cut_server_from_etcd(self) -> None:
        self._world.cut(self._server().process.name, ETCD, self._for_s())

    def _trainer(self) -> LoopProcess:
        return self._chance.choice(self._world.current()[:-1]).process

    def _kill_trainer(self) -> None:
        self._world.kill(self._trainer())
        self._world.clock.later(1.0 + self._for_s() / 4, self._world.next_generation)

    def _replace_trainer(self) -> None:
        """Start a generation while the old one continues, perhaps after a pause."""
        for each in self._world.current()[:-1]:
            if self._chance.random() < 0.5:
                self._world.pause(each.process, self._for_s())
        self._world.next_generation()

    def _pause_trainer(self) -> None:
        self._world.pause(self._trainer(), self._for_s())

    def _cut_trainer(self) -> None:
        one, other, for_s = self._trainer().name, self._any().name, self._for_s()
        if one != other:
            self._world.cut(one, other, for_s)

    def _replace_script(self) -> None:
        script = self._world.current()[-1].process
        if self._chance.random() < 0.5:
            self._world.kill(script)
        else:
            self._world.pause(script, 60.0)
        self._world.next_script()

    def _pause_script(self) -> None:
        self._world.pause(self._world.current()[-1].process, self._for_s())

    def _reader(self) -> LoopProcess:
        return self._chance.choice(self._world.readers).process

    def _kill_reader(self) -> None:
        self._world.kill(self._reader())

    def _new_reader(self) -> None:
        if len(self._world.readers) < 8:
            self._world.start_reader(self._chance.choice(self._world.series))

    def _pause_reader(self) -> None:
        self._world.pause(self._reader(), self._for_s())

    def _cut_reader(self) -> None:
        self._world.cut(self._reader().name, self._world.leader.process.name, self._for_s())

    def _slow_reader(self) -> None:
        """Delay a reader's messages, so that they may arrive out of order."""
        one, other = self._reader().name, self._world.leader.process.name
        self._world.network.slow_down(one, other, 5.0)
        self._world.clock.later(
            self._for_s(), lambda: self._world.network.slow_down(one, other, 0.0)
        )

    def _slow_trainer(self) -> None:
        """Delay a trainer's messages, so that an answer may arrive after its call has ended."""
        one, other = self._trainer().name, self._world.leader.process.name
        self._world.network.slow_down(one, other, 40.0)
        self._world.clock.later(
            self._for_s(), lambda: self._world.network.slow_down(one, other, 0.0)
        )

    def _kill_coordinator(self) -> None:
        self._world.restart_coordinator(self._chance.choice(self._world.coordinators))

    def _depose(self) -> None:
        self._world.depose(tells=True)

    def _depose_without_notice(self) -> None:
        self._world.depose(tells=False)

    def _pause_coordinator(self) -> None:
        self._world.pause(self._world.leader.process, self._for_s())

    def _cut_coordinator(self) -> None:
        other = self._chance.choice([ETCD, ETCD, self._any().name])
        self._world.cut(self._world.leader.process.name, other, self._for_s())

    def _etcd(self) -> None:
        self._world.stop_etcd(self._for_s() / 2)

    def _kill_worker(self) -> None:
        living = [each for each in self._world.workers if each.process.alive]
        self._world.kill_worker(self._chance.choice(living))

    def _worker(self) -> LoopProcess:
        return self._chance.choice(self._world.workers).process

    def _pause_worker(self) -> None:
        self._world.pause(self._worker(), self._for_s())

    def _cut_worker(self) -> None:
        self._world.cut(self._worker().name, self._server().process.name, self._for_s())

    def _move_shard(self) -> None:
        self._world.shards.move(self._chance.randrange(NUM_SHARDS))

    # --- an operator ---

    def _kept(self) -> tuple[str, int] | None:
        name = self._chance.choice(self._world.series)
        stored = self._world.ledger.series.get(name)
        return (
            (name, self._chance.choice(stored.head.kept)) if stored and stored.head.kept else None
        )

    def _pin(self, *, unpin: bool = False) -> None:
        if (found := self._kept()) is not None:
            request = pb.PinVersionRequest(series=found[0], number=found[1], unpin=unpin)
            self._operator.start(self._ask(lambda s: s.Pin(request, None)))

    def _unpin(self) -> None:
        self._pin(unpin=True)

    def _rollback(self) -> None:
        if (found := self._kept()) is not None:
            request = pb.RollbackRequest(series=found[0], to=found[1])
            self._operator.start(self._ask(lambda s: s.Rollback(request, None)))

    async def _ask(self, make: object) -> None:
        world = self._world
        try:
            await ask(world.etcd, self._operator, world.coordinators, make, 5.0)  # type: ignore[arg-type]
        except ShoalError as error:
            world.note(f"the operator is refused: {type(error).__name__}")


def simulate_publications(
    seed: int, only: Sequence[str] = (), *, has_tables: bool | None = None
) -> PublicationWorld:
    """Run one seed. Every fourth has a series with tables, unless `has_tables` says otherwise.

    Raises AssertionError with the end of the run's log.
    """
    chance = random.Random(f"schedule {seed}")
    world = PublicationWorld(
        seed,
        num_servers=chance.choice([2, 3, 3, 4]),
        num_readers=chance.choice([2, 3, 4]),
        keep=chance.choice([1, 2, 2, 3]),
        has_tables=seed % 4 == 1 if has_tables is None else has_tables,
    )
    faults = Faults(world, seed, only)
    rate_s = chance.choice([1.0, 2.0, 4.0, 8.0])
    try:
        world.run(8.0)
        while world.clock.now_s < RUN_S:
            faults.strike()
            world.run(rate_s * chance.expovariate(1.0))
        world.calm()
        committed = world.ledger.num_commits
        ends_s = world.clock.now_s + CALM_S
        while world.unrest() or world.ledger.num_commits < committed + 3:
            assert world.clock.now_s < ends_s, (
                f"no rest: {world.unrest() or 'nothing is published'}"
            )
            world.run(5.0)
    except Exception as error:
        story = "\n".join(f"{at_s:9.3f} {what}" for at_s, what in world.story[-STORY_LINES:])
        trace = "".join(traceback.format_exception(error))
        at_s = world.clock.now_s
        raise AssertionError(f"seed {seed} at {at_s:.3f} s:\n{story}\n{trace}") from error
    finally:
        faults.close()
        world.close()
    return world
