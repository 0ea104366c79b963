"""Publishers, readers, servers, coordinators and etcd under faults of every kind."""

import zlib
from collections.abc import Callable, Iterable, Iterator

from support.sim.event_loop import LoopProcess
from support.sim.publications.clients import (
    SimPublisher,
    SimReader,
    SimTablesPublisher,
    member,
    script,
)
from support.sim.publications.coordinators import SimCoordinator
from support.sim.publications.etcd import SimEtcd
from support.sim.publications.ledger import Ledger, series_values
from support.sim.publications.servers import SimServer
from support.sim.publications.shards import ShardPlacement, SimWorker
from support.sim.replication.machine import Network
from support.sim.virtual_time import Clock

from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.etcd import keys
from shoal_server.etcd.records import series as records

JOB_SERIES = "rl/policy"
SCRIPT_SERIES = "svc/ranker"
TABLES_SERIES = "rl/full"
NUM_WORKERS = 2
SESSION_ENDS_S = 3.0
"""Time after which the session of a dead worker is over."""
ELECTED_WITHIN_S = 5.0
"""Time after which a leader without contact to etcd has a successor."""


class PublicationWorld:
    """A cluster, with a trainer, a plain script, and readers of both."""

    def __init__(
        self,
        seed: int,
        *,
        num_servers: int = 3,
        num_readers: int = 3,
        keep: int = 2,
        has_tables: bool = False,
    ) -> None:
        """`has_tables`: the job has shards, and publishes a third series with them."""
        self.clock = Clock(seed)
        self.network = Network(self.clock)
        self.etcd = SimEtcd(self.clock, self.network)
        self.keep = keep
        self.story: list[tuple[float, str]] = []
        self.servers: dict[str, SimServer] = {}
        """The newest process of each server."""
        self.publishers: list[SimPublisher] = []
        """Every process that was ever a publisher."""
        self.ledger = Ledger(self.clock, self._living, self._leases)
        self.etcd.on_write = self._recorded
        self._old_servers: list[SimServer] = []
        self._old_coordinators: list[SimCoordinator] = []
        self._num_starts = 0
        self._is_closed = False
        self.broken: AssertionError | None = None
        """The first violation."""
        self.generation = 0
        self._num_scripts = 0
        self._faulty: set[tuple[int, int]] = set()
        self.workers: list[SimWorker] = []
        """Every process that was ever a worker that pushes to shards."""
        self._dead_sessions: set[str] = set()
        self.shards = ShardPlacement(self)
        self.series = [JOB_SERIES, SCRIPT_SERIES, *([TABLES_SERIES] if has_tables else [])]
        self.coordinators = [
            SimCoordinator(self.etcd, f"coordinator {n}", self.servers) for n in range(2)
        ]
        self.leader = self.coordinators[0]
        self._leader_heard_s = 0.0
        for number in range(num_servers):
            self.start_server(f"s{number}")
        self.readers: list[SimReader] = []
        for number in range(num_readers):
            name = SCRIPT_SERIES if number == num_readers - 1 else JOB_SERIES
            self.start_reader(name)
        if has_tables:
            self.shards.place()
            self.start_reader(TABLES_SERIES)
            for _ in range(NUM_WORKERS):
                self.start_worker()
        self._elect(self.leader)
        self.next_generation()
        self.next_script()
        self._tick()

    # --- checks ---

    def note(self, what: str) -> None:
        self.story.append((self.clock.now_s, what))

    def _living(self) -> dict[str, Callable[[str, bytes], bool]]:
        processes = [*self.servers.values(), *self._old_servers]
        return {each.process.name: each.has for each in processes if each.process.alive}

    def _leases(self) -> Iterator[tuple[str, str, int]]:
        for reader in self.readers:
            if reader.process.alive:
                yield from ((reader.name, reader.series, n) for n in reader.leased())

    def _recorded(self) -> None:
        try:
            self._check_records()
        except AssertionError as error:
            # Raised later: the code that wrote the record must not see the error.
            self.broken = self.broken or error

    def _check_records(self) -> None:
        items = self.etcd.items()
        values = series_values(items)
        for series in records.names_in(values):
            stored = records.parse_series(series, values)
            for version in stored.versions.values() if stored is not None else ():
                if version.layout_digest not in self.ledger.layouts:
                    self.ledger.layouts[version.layout_digest] = self._layout(
                        series, version.layout_digest, items
                    )
        self.ledger.recorded(values)

    def _layout(self, series: str, digest: bytes, items: dict[str, bytes]) -> pb.Layout:
        key = keys.series_layout_chunk(series, digest.hex(), 0)
        assert key in items, f"{series}: a version without its layout"
        return pb.Layout.FromString(zlib.decompress(items[key]))

    def is_faulty(self, publication: int, rank: int) -> bool:
        """True if the rank is to publish rows that are not its own."""
        return rank == 1 and publication % 7 == 3

    # --- processes ---

    def start_server(self, server_id: str) -> None:
        self._num_starts += 1
        old = self.servers.get(server_id)
        if old is not None:
            self.kill_server(old)
            self._old_servers.append(old)
        self.note(f"{server_id} starts as {self._num_starts}")
        server = SimServer(
            self.etcd,
            server_id,
            self._num_starts,
            self.servers,
            lambda session: session not in self._dead_sessions,
        )
        server.shards.on_segment = self.ledger.contents.__setitem__
        if old is not None and old.received_s:
            server.unlist()  # its registration is replaced by the new one's
        self.servers[server_id] = server
        server.start()

    def kill_server(self, server: SimServer) -> None:
        if server.process.alive:
            self.note(f"{server.process.name} is killed")
            had = [(each.series, each.segment.digest) for each in server.store.held()]
            server.process.die()
            self.ledger.died(had)

    def start_reader(self, series: str) -> SimReader:
        reader = SimReader(self, series, f"r{len(self.readers)}")
        reader.slow_s = self.clock.random.choice([0.3, 2.0, 8.0, 25.0])
        self.readers.append(reader)
        reader.start()
        return reader

    def next_generation(self) -> None:
        """Start a generation. Replaced members may continue, as nothing notifies them."""
        self.generation += 1
        num_ranks = self.clock.random.choice([1, 2, 2, 3])
        self.note(f"generation {self.generation} of {num_ranks} ranks")
        for rank in range(num_ranks):
            self._start_publisher(JOB_SERIES, member(self.generation), rank, num_ranks)
        if TABLES_SERIES in self.series:
            self._start_publisher(TABLES_SERIES, member(self.generation), 0, 1)

    def next_script(self) -> None:
        self._num_scripts += 1
        self._start_publisher(SCRIPT_SERIES, script(self._num_scripts), 0, 1)

    def _start_publisher(self, series: str, who: pb.Publisher, rank: int, num_ranks: int) -> None:
        kind = SimTablesPublisher if series == TABLES_SERIES else SimPublisher
        publisher = kind(self, series, who, rank, num_ranks)
        self.publishers.append(publisher)
        publisher.start()

    def start_worker(self) -> None:
        worker = SimWorker(self, f"w{len(self.workers)}")
        self.workers.append(worker)
        worker.start()

    def kill_worker(self, worker: SimWorker) -> None:
        """Kill a worker, perhaps half-way through a step, and start another one."""
        self.kill(worker.process)
        self.clock.later(SESSION_ENDS_S, lambda: self._dead_sessions.add(worker.session))
        self.start_worker()

    def current(self) -> list[SimPublisher]:
        """The ranks of the newest generation, and the newest script."""
        members = [p for p in self.publishers if p.publisher.generation == self.generation]
        return [*members, [p for p in self.publishers if p.series == SCRIPT_SERIES][-1]]

    def processes(self) -> Iterable[LoopProcess]:
        yield from (each.process for each in self.coordinators)
        yield from (each.process for each in self.servers.values())
        yield from (each.process for each in self.readers)
        yield from (each.process for each in self.publishers)
        yield from (each.process for each in self.workers)

    # --- faults ---

    def kill(self, process: LoopProcess) -> None:
        if process.alive:
            self.note(f"{process.name} is killed")
            process.die()

    def pause(self, process: LoopProcess, for_s: float) -> None:
        if process.alive and process.paused_since_s is None:
            self.note(f"{process.name} is paused for {for_s:.1f} s")
            process.pause()
            since_s = process.paused_since_s
            self.clock.later(
                for_s, lambda: process.wake() if process.paused_since_s == since_s else None
            )

    def cut(self, one: str, other: str, for_s: float) -> None:
        self.note(f"{one} and {other} are cut off for {for_s:.1f} s")
        self.network.cut(one, other)
        since_s = self.network.cut_since_s(one, other)

        def mend() -> None:
            if self.network.cut_since_s(one, other) == since_s:
                self.network.mend(one, other)

        self.clock.later(for_s, mend)

    def stop_etcd(self, for_s: float) -> None:
        self.note(f"etcd is away for {for_s:.1f} s")
        self.etcd.back_s = max(self.etcd.back_s, self.clock.now_s + for_s)

    def restart_coordinator(self, coordinator: SimCoordinator) -> None:
        self.kill(coordinator.process)
        index = self.coordinators.index(coordinator)
        fresh = SimCoordinator(self.etcd, f"coordinator {index}'", self.servers)
        self._old_coordinators.append(coordinator)
        self.coordinators[index] = fresh

    def depose(self, *, tells: bool) -> None:
        """Elect another coordinator. The old one ends its term later if `tells`, else not."""
        others = [c for c in self.coordinators if c is not self.leader and c.process.alive]
        candidates = [c for c in others if self.etcd.reaches(c.process)] or [self.leader]
        old, term = self.leader, self.leader.num_terms
        self._elect(candidates[0])
        if tells:
            self.clock.later(self.clock.random.random() * 3.0, lambda: old.end_term(term))

    def _elect(self, coordinator: SimCoordinator) -> None:
        self.note(f"{coordinator.process.name} is elected")
        self.leader = coordinator
        self._leader_heard_s = self.ledger.elected_s = self.clock.now_s
        coordinator.lead(self.etcd.elect())

    def _tick(self) -> None:
        """End registrations and terms whose processes have no contact to etcd. Runs each second."""
        if self._is_closed:
            return
        for server in self.servers.values():
            server.look_listed()
        self.shards.replace_dead()
        process = self.leader.process
        is_heard = process.alive and process.paused_since_s is None and self.etcd.reaches(process)
        if is_heard and self.leader in self.coordinators and not self.leader.is_over:
            self._leader_heard_s = self.clock.now_s
        is_etcd_there = self.clock.now_s >= self.etcd.back_s
        if is_etcd_there and self.clock.now_s - self._leader_heard_s > ELECTED_WITHIN_S:
            self.depose(tells=True)
        if self.broken is not None:
            raise self.broken
        for each in self.processes():
            if isinstance(each, LoopProcess) and each.loop.failures:
                raise each.loop.failures[0]
        self.clock.later(1.0, self._tick)

    # --- the end ---

    def calm(self) -> None:
        """Stop all faults, and start all missing processes."""
        self.note("all faults stop")
        self.network.mend_all()
        self.etcd.back_s = 0.0
        self.etcd.loses_answers = False
        for process in self.processes():
            if process.paused_since_s is not None:
                process.wake()
        for server_id, server in list(self.servers.items()):
            if not server.process.alive:
                self.start_server(server_id)
        for coordinator in list(self.coordinators):
            if not coordinator.process.alive:
                self.restart_coordinator(coordinator)
        if not self.leader.process.alive:
            self._elect(self.coordinators[0])
        current = self.current()
        if not all(p.process.alive for p in current[:-1]):
            self.next_generation()
        if not current[-1].process.alive or current[-1].is_replaced:
            self.next_script()
        for reader in self.readers:
            reader.slow_s = 0.3
            if not reader.process.alive:
                self.start_reader(reader.series)

    def close(self) -> None:
        """End every task of every process."""
        self._is_closed = True
        self.etcd.on_write = lambda: None
        self.etcd.back_s = float("inf")
        old = [*self._old_servers, *self._old_coordinators]
        for process in [*self.processes(), *(each.process for each in old)]:
            process.close()
        self.run(1.0)

    def run(self, for_s: float) -> None:
        self.clock.run(self.clock.now_s + for_s)

    def unrest(self) -> str:
        """Describe what is not at rest yet after all faults have stopped; empty if nothing is."""
        for name in self.series:
            stored = self.ledger.series.get(name)
            if stored is None or not stored.head.kept:
                return f"nothing of {name} was published"
            for reader in self.readers:
                is_behind = reader.installed < stored.head.number - 2
                if reader.series == name and reader.process.alive and is_behind:
                    return f"{reader.name} has {reader.installed} of {stored.head.number}"
            for version in stored.versions.values():
                for segment in version.segments:
                    num = sum(s.has(name, segment.digest) for s in self.servers.values())
                    if num < 2:
                        return f"version {version.number} of {name} has {num} copies"
        return ""
