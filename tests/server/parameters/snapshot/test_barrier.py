"""The barrier of a snapshot: in any order of events, a cut has each step as a whole or not at
all."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal_proto.errors import SnapshotFailed
from shoal_server.core.shards.steps import Begun, Shards, StepId, merged
from shoal_server.parameters.snapshot.barrier import (
    MAX_STEPS,
    BarrierPhase,
    Lacking,
    SnapshotBarrier,
)

A1, A2, A3 = (StepId("a", number) for number in (1, 2, 3))
B1 = StepId("b", 1)


def always(session: str) -> bool:
    return True


def applied_are(*steps: StepId) -> Lacking:
    return lambda step, shards: () if step in steps else (1, 2)


def passed(barrier: SnapshotBarrier, step: StepId) -> None:
    assert barrier.may_enter(step)
    barrier.enter(step, None)
    barrier.leave(step, applied_are(step))


def test_an_open_barrier_admits_all_steps() -> None:
    barrier = SnapshotBarrier()
    for step in (A1, A2, B1, A3):
        passed(barrier, step)
    assert barrier.phase is BarrierPhase.OPEN


def test_a_closed_barrier_admits_only_steps_that_have_begun_here() -> None:
    barrier = SnapshotBarrier()
    passed(barrier, A1)
    assert barrier.close("cut") == {A1: None}
    assert barrier.may_enter(A1)
    assert not barrier.may_enter(A2) and not barrier.may_enter(B1)


def test_a_draining_barrier_admits_and_awaits_steps_that_have_begun_elsewhere() -> None:
    barrier = SnapshotBarrier()
    passed(barrier, A1)
    barrier.close("cut")
    barrier.drain("cut", {A1: None, A2: None})
    assert not barrier.may_enter(A3)
    assert barrier.waits_for(applied_are(A1), always) == [A2]
    passed(barrier, A2)
    assert barrier.waits_for(applied_are(A1, A2), always) == []
    assert barrier.give_up_incomplete_steps(applied_are(A1, A2)) == []
    assert barrier.open("cut") and barrier.may_enter(A3)


def test_a_step_without_shards_here_is_not_waited_for() -> None:
    barrier = SnapshotBarrier()
    barrier.close("cut")
    barrier.drain("cut", {A1: frozenset({7})})
    assert barrier.waits_for(lambda step, shards: () if shards == {7} else (1,), always) == []


def test_a_part_that_was_admitted_and_not_applied_is_waited_for() -> None:
    """The shard may have moved, and the client repeats the call."""
    barrier = SnapshotBarrier()
    barrier.enter(A1, None)
    barrier.leave(A1, applied_are())
    barrier.drain("cut", barrier.close("cut"))
    assert barrier.waits_for(applied_are(), always) == [A1]


def test_a_part_that_was_refused_for_good_is_not_waited_for() -> None:
    barrier = SnapshotBarrier()
    barrier.enter(A1, None)
    barrier.refuse(A1, 1)
    barrier.leave(A1, applied_are())
    barrier.drain("cut", barrier.close("cut"))
    assert barrier.waits_for(applied_are(), always) == [A1]
    barrier.refuse(A1, 2)
    assert (
        barrier.waits_for(applied_are(), always)
        == []
        == barrier.give_up_incomplete_steps(applied_are())
    )


def test_a_step_that_was_refused_in_part_is_reported_until_the_part_is_made_up_for() -> None:
    """Shard 1 applies the step, shard 2 refuses it twice, and then applies it as step 3."""
    barrier, lacking = SnapshotBarrier(), dict[StepId, tuple[int, ...]]()

    def lacks(step: StepId, shards: Shards) -> Sequence[int]:
        return [i for i in lacking.get(step, ()) if shards is None or i in shards]

    def cut() -> list[StepId]:
        barrier.drain("cut", barrier.close("cut"))
        assert barrier.waits_for(lacks, always) == [] == barrier.give_up_incomplete_steps(lacks)
        torn = barrier.half_refused_steps(lacks)
        assert barrier.open("cut")
        return torn

    lacking[A1] = (2,)
    barrier.enter(A1, None)
    barrier.note_applied(A1)
    barrier.refuse(A1, 2)
    barrier.leave(A1, lacks)
    assert cut() == [A1]
    lacking[A2] = (1, 2)
    barrier.enter(A2, frozenset({2}))
    barrier.refuse(A2, 2)
    barrier.leave(A2, lacks)
    assert cut() == [A1]
    lacking[A3] = (1,)
    barrier.enter(A3, frozenset({2}))
    barrier.note_applied(A3)
    barrier.leave(A3, lacks)
    assert cut() == []


def test_steps_of_lost_members_are_reported_and_not_waited_for() -> None:
    barrier = SnapshotBarrier()
    barrier.enter(A1, None)
    barrier.drain("cut", barrier.close("cut"))
    assert barrier.waits_for(applied_are(), lambda session: session != "a") == []
    assert barrier.give_up_incomplete_steps(applied_are()) == [A1]


def test_a_step_given_up_by_one_cut_is_awaited_again_only_once_it_continues() -> None:
    barrier = SnapshotBarrier()
    barrier.enter(A1, None)
    barrier.leave(A1, applied_are())
    barrier.drain("first", barrier.close("first"))
    assert barrier.give_up_incomplete_steps(applied_are()) == [A1]
    barrier.open("first")
    barrier.drain("second", barrier.close("second"))
    assert barrier.waits_for(applied_are(), always) == []
    assert barrier.give_up_incomplete_steps(applied_are()) == [A1]
    barrier.enter(A1, None)
    assert barrier.waits_for(applied_are(), always) == [A1]


def test_steps_of_a_shard_that_arrived_are_waited_for() -> None:
    barrier = SnapshotBarrier()
    passed(barrier, A2)
    barrier.add_steps({A1: None})
    barrier.drain("cut", barrier.close("cut"))
    assert barrier.waits_for(applied_are(A1), always) == [A2]


def test_old_steps_of_a_shard_do_not_displace_later_ones() -> None:
    """Shards that arrive one after another remember different steps of a session."""
    barrier = SnapshotBarrier()
    steps = [StepId("a", 1 + number) for number in range(MAX_STEPS + 1)]
    for remembered in (steps[:-1], steps[1:], steps[:-1]):
        barrier.add_steps(dict.fromkeys(remembered))
    assert sorted(barrier.close("cut")) == steps[1:]


def test_only_one_cut_is_taken_at_a_time() -> None:
    barrier = SnapshotBarrier()
    barrier.close("first")
    with pytest.raises(SnapshotFailed, match="another snapshot is being taken"):
        barrier.close("second")
    with pytest.raises(SnapshotFailed, match="cut second is over"):
        barrier.drain("second", {})
    assert not barrier.open("second") and barrier.open("first") and not barrier.open("first")
    with pytest.raises(SnapshotFailed, match="expected one that is closed"):
        barrier.drain("first", {})
    barrier.close("second")


def test_only_the_newest_steps_are_remembered() -> None:
    barrier = SnapshotBarrier()
    for number in range(1, 100):
        passed(barrier, StepId("a", number))
    begun = barrier.close("cut")
    assert sorted(step.sequence for step in begun) == list(range(100 - MAX_STEPS, 100))
    # A repetition of a forgotten step is admitted: its shards do not apply it again.
    assert barrier.may_enter(StepId("a", 3)) and not barrier.may_enter(StepId("a", 100))


def test_a_barrier_is_quiet_once_its_sessions_and_their_parts_have_ended() -> None:
    barrier = SnapshotBarrier()
    passed(barrier, A1)
    assert not barrier.is_quiet(always) and barrier.is_quiet(lambda session: False)
    barrier.enter(A2, None)
    assert not barrier.is_quiet(lambda session: False)
    barrier.leave(A2, applied_are(A2))
    barrier.close("cut")
    assert not barrier.is_quiet(lambda session: False)


def test_a_step_of_all_shards_on_one_server_is_merged_as_one_of_all_shards() -> None:
    assert merged([{A1: frozenset({1}), A2: None}, {A1: frozenset({2}), A2: frozenset({1})}]) == {
        A1: frozenset({1, 2}),
        A2: None,
    }


# Many interleavings, with servers that only record the steps pushed to each shard.


@dataclass
class Server:
    shard_ids: Sequence[int]
    barrier: SnapshotBarrier = field(default_factory=SnapshotBarrier)
    shards: dict[int, set[StepId]] = field(default_factory=dict)
    taken: dict[int, frozenset[StepId]] | None = None

    def __post_init__(self) -> None:
        self.shards = {shard_id: set() for shard_id in self.shard_ids}

    def lacking(self, step: StepId, shards: Shards) -> list[int]:
        touched = [i for i in self.shard_ids if shards is None or i in shards]
        return [i for i in touched if step not in self.shards[i]]

    def try_to_take(self, cut_id: str) -> bool:
        if self.barrier.phase is not BarrierPhase.DRAINING or self.barrier.waits_for(
            self.lacking, always
        ):
            return False
        assert self.barrier.give_up_incomplete_steps(self.lacking) == []
        self.taken = {shard_id: frozenset(steps) for shard_id, steps in self.shards.items()}
        return self.barrier.open(cut_id)


@dataclass
class Part:
    """Part of a step on one server: it enters, its shards apply it one after the other, it
    leaves."""

    step: StepId
    shards: Shards
    server: Server
    todo: list[int]
    inside: bool = False

    def advance(self, breaks: bool) -> bool:
        """Take one turn; return True if the part is done."""
        barrier = self.server.barrier
        if not self.inside:
            if barrier.may_enter(self.step):
                barrier.enter(self.step, self.shards)
                self.inside = True
            return False
        if self.todo and not breaks:
            self.server.shards[self.todo.pop()].add(self.step)
            return False
        # The connection may break at any time; the client then calls again for the rest.
        barrier.leave(self.step, self.server.lacking)
        self.inside = False
        return not self.todo


@dataclass
class Client:
    session: str
    servers: Sequence[Server]
    num_steps: int
    window: int
    sparse: bool
    next: int = 1
    parts: list[Part] = field(default_factory=list)

    def advance(self, pick: int) -> None:
        in_flight = {part.step.sequence for part in self.parts}
        if self.next <= self.num_steps and len(in_flight) < self.window and pick % 3 == 0:
            self.begin()
        elif self.parts:
            # Part and break are drawn independently: otherwise some part might break every time.
            turn, at = divmod(pick, len(self.parts))
            part = self.parts[at]
            if part.advance(breaks=turn % 7 == 0):
                self.parts.remove(part)

    def begin(self) -> None:
        step = StepId(self.session, self.next)
        all_ids = [i for server in self.servers for i in server.shard_ids]
        chosen = [i for i in all_ids if not self.sparse or (i + self.next) % 3]
        touched = frozenset(chosen) if self.sparse else None
        for server in self.servers:
            mine = [i for i in server.shard_ids if i in chosen]
            if mine:
                self.parts.append(Part(step, touched, server, mine))
        self.next += 1

    @property
    def done(self) -> bool:
        return self.next > self.num_steps and not self.parts


@dataclass
class Coordinator:
    """Coordinator that calls the servers one after the other, in any order."""

    servers: Sequence[Server]
    reports: dict[int, Begun] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)

    def advance(self, pick: int) -> None:
        at = pick % len(self.servers)
        barrier = self.servers[at].barrier
        if len(self.reports) < len(self.servers):
            if at not in self.reports:
                self.reports[at] = barrier.close("cut")
        elif at not in self.drained:
            barrier.drain("cut", merged(self.reports.values()))
            self.drained.add(at)
        elif at not in self.taken and self.servers[at].try_to_take("cut"):
            self.taken.add(at)

    @property
    def done(self) -> bool:
        return len(self.taken) == len(self.servers)


@settings(max_examples=60, deadline=None)
@example(
    num_servers=3,
    windows=[(4, True), (4, True)],
    warm_up=[],
    picks=[0, 0, 0, 0, 1, 1, 187, 1, 1, 1, 21, 350, 514],
)
@example(
    num_servers=2,
    windows=[(1, False), (4, False), (4, False)],
    warm_up=[1, 2, 256, 518],
    picks=[0],
)
@given(
    num_servers=st.integers(1, 3),
    windows=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3),
    warm_up=st.lists(st.integers(0, 1000), max_size=60),
    picks=st.lists(st.integers(0, 1000), min_size=1, max_size=150),
)
def test_each_step_is_whole_in_any_interleaving(
    num_servers: int, windows: list[tuple[int, bool]], warm_up: list[int], picks: list[int]
) -> None:
    servers = [Server(range(3 * i, 3 * i + 1 + i)) for i in range(num_servers)]
    clients = [
        Client(f"session{i}", servers, 12, window, sparse)
        for i, (window, sparse) in enumerate(windows)
    ]
    coordinator = Coordinator(servers)
    for pick in warm_up:
        clients[pick % len(clients)].advance(pick // 3)
    actors: list[Client | Coordinator] = [*clients, coordinator]
    for pick in picks:
        actors[pick % len(actors)].advance(pick // len(actors))
    # All actors continue until the cut and every step are done, in random order: in a fixed one, a
    # part might break at each of its turns.
    chance = random.Random(0)
    for _ in range(20_000):
        if coordinator.done and all(client.done for client in clients):
            break
        chance.choice(actors).advance(chance.randrange(1000))
    assert coordinator.done and all(client.done for client in clients)
    check_whole(servers, clients)


def check_whole(servers: Sequence[Server], clients: Sequence[Client]) -> None:
    taken = {i: steps for server in servers for i, steps in (server.taken or {}).items()}
    for client in clients:
        for number in range(1, client.num_steps + 1):
            step = StepId(client.session, number)
            touched = [i for i in taken if not client.sparse or (i + number) % 3]
            holders = {i for i in touched if step in taken[i]}
            assert holders in (set(), set(touched)), (step, holders, touched)
        if client.window == 1 and not client.sparse:
            for steps in taken.values():
                numbers = sorted(s.sequence for s in steps if s.session == client.session)
                assert numbers == list(range(1, len(numbers) + 1))
