"""A simulated history of pushes and answers, drawn from a seed; its server may be faulty."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from history.events import Answered, Event, Gradients, Seen, Sent, Verdict
from history.twin import Twin

from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Shard

NUM_SESSIONS = 4
UNKNOWN_RATE, REFUSED_RATE, QUIET_RATE = 0.1, 0.05, 0.3


@dataclass
class Server:
    """A faultless server: shards with their versions. A faulty subclass overrides `apply`."""

    twins: dict[int, Twin]
    versions: dict[int, int]
    num_applied: int = 0

    def apply(self, gradients: Gradients) -> dict[int, int]:
        """Apply a push to all shards; return the version of each right after it."""
        self.num_applied += 1
        for twin in self.twins.values():
            twin.apply(gradients)
        return self.advance()

    def advance(self) -> dict[int, int]:
        self.versions = {shard_id: version + 1 for shard_id, version in self.versions.items()}
        return dict(self.versions)

    def values(self) -> dict[int, tuple[int, int]]:
        return {i: (self.versions[i], twin.checksum()) for i, twin in self.twins.items()}


@dataclass
class _Flight:
    """A push that was sent and not yet answered."""

    session: str
    sequence: int
    gradients: Gradients
    verdict: Verdict
    is_applied: bool
    versions: dict[int, int] = field(default_factory=dict)
    values: dict[int, tuple[int, int]] = field(default_factory=dict)
    stage: int = 0


class Simulation:
    """Sessions with at most one push in flight each, interleaved at random."""

    def __init__(self, seed: int, server: Server) -> None:
        self._rng = random.Random(seed)
        self._server = server
        self._clock_s = 0.0
        self._flights: dict[int, _Flight] = {}
        self._names = [f"s{i}" for i in range(NUM_SESSIONS)]
        self._sequences = [0] * NUM_SESSIONS
        self.events: list[Event] = []

    def run(self, num_pushes: int) -> list[Event]:
        """Run `num_pushes` pushes, one more that shows the optimizer's state, and a last pull."""
        num_sent = 0
        while num_sent < num_pushes or self._flights:
            i = self._rng.randrange(NUM_SESSIONS)
            if i in self._flights:
                self._go_on(i)
            elif num_sent < num_pushes:
                num_sent += 1
                self._send(i)
        self._settle()
        return self.events

    def _settle(self) -> None:
        gradients = Gradients(seed=self._rng.getrandbits(32), lr=[0.1, 0.1], absent=[])
        self._flights[0] = _Flight("last", 1, gradients, Verdict.ACKNOWLEDGED, is_applied=True)
        self._begin(self._flights[0])
        self._go_on(0)
        self._go_on(0)
        self.events.append(Seen(session="", at_s=self._tick(), values=self._server.values()))

    def _send(self, i: int) -> None:
        self._sequences[i] += 1
        absent = ["b"] if self._rng.random() < 0.2 else []
        lr = [self._rng.choice([0.1, 0.01]), 0.05]
        gradients = Gradients(seed=self._rng.getrandbits(32), lr=lr, absent=absent)
        drawn = self._rng.random()
        verdict, is_applied = Verdict.ACKNOWLEDGED, True
        if drawn < UNKNOWN_RATE:
            verdict, is_applied = Verdict.UNKNOWN, self._rng.random() < 0.5
        elif drawn < UNKNOWN_RATE + REFUSED_RATE:
            verdict, is_applied = Verdict.REFUSED, False
        flight = _Flight(self._names[i], self._sequences[i], gradients, verdict, is_applied)
        self._flights[i] = flight
        self._begin(flight)

    def _begin(self, flight: _Flight) -> None:
        sent = Sent(
            session=flight.session,
            sequence=flight.sequence,
            gradients=flight.gradients,
            at_s=self._tick(),
        )
        self.events.append(sent)

    def _go_on(self, i: int) -> None:
        flight = self._flights[i]
        if flight.stage == 0:
            flight.stage = 1
            if flight.is_applied:
                flight.versions = self._server.apply(flight.gradients)
                flight.values = self._server.values()
            return
        del self._flights[i]
        if flight.verdict is Verdict.UNKNOWN:
            # The session has ended; the worker continues with a new one.
            self._names[i], self._sequences[i] = f"{self._names[i]}+", 0
            return
        self._answer(flight)

    def _answer(self, flight: _Flight) -> None:
        at_s = self._tick()
        if flight.values and self._rng.random() > QUIET_RATE:
            seen = Seen(session=flight.session, at_s=at_s, values=flight.values)
            self.events.append(seen)
        answered = Answered(
            session=flight.session,
            sequence=flight.sequence,
            verdict=flight.verdict,
            at_s=at_s,
            versions=flight.versions,
        )
        self.events.append(answered)

    def _tick(self) -> float:
        self._clock_s += 1.0
        return self._clock_s


def history(
    shards: Sequence[Shard],
    optimizer: OptimizerSpec,
    seed: int,
    *,
    num_pushes: int = 40,
    make: Callable[[dict[int, Twin], dict[int, int]], Server] = Server,
) -> list[Event]:
    """Simulate a run, and return the events that its workers journal."""
    twins = {shard.shard_id: Twin(shard, optimizer) for shard in shards}
    server = make(twins, dict.fromkeys(twins, 1))
    return Simulation(seed, server).run(num_pushes)


__all__ = ["Server", "history"]
