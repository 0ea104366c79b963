"""Seeded runs in which the leader dies during one change of a job, and nothing else fails.

Members repeat to the next leader what the old one alone knew. So the change still happens, and no
wait runs into a time limit.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.sim.world import SimWorld

from shoal_server.core.generations.roster import JobSpec

FORMED_S, AGAIN_S = 4.0, 4.0
"""Shorter than the limits to agree, stop or bring up; see `shoal_server.core.limits`."""

PAUSE_S = 40.0
"""Longer than the limits of members' waits for each other."""

CRASHES = 8
"""Number of leaders that crash, one after another."""

LATER_S = 10.0
"""Limit after an outage, in which launchers' reports were lost: a loss shows only by silence."""


def joins(world: SimWorld) -> None:
    """Join a member: a planned change without a loss."""
    world.join("d")


def drains(world: SimWorld) -> None:
    world.drain("c", by_operator=False)


def is_lost(world: SimWorld) -> None:
    world.kill("c", seen_by_launcher=True)


def is_lost_while_another_joins(world: SimWorld) -> None:
    world.join("d")
    world.run(0.3)
    world.kill("c", seen_by_launcher=True)


CHANGES: tuple[Callable[[SimWorld], None], ...] = (
    joins,
    drains,
    is_lost,
    is_lost_while_another_joins,
)


@contextmanager
def _with_log(world: SimWorld, which: str) -> Iterator[None]:
    """Add the log of the run to an assertion that fails in the block."""
    try:
        yield
    except AssertionError as error:
        story = "\n".join(world.story[-60:])
        raise AssertionError(f"{error}\n{which}\n{story}") from error


def simulate_failover(seed: int) -> None:
    """Run one seed. Raises AssertionError with the log of the run."""
    chance = random.Random(f"failover {seed}")
    change = CHANGES[seed % len(CHANGES)]
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    with _with_log(world, f"failover seed {seed}"):
        for name in ("a", "b", "c"):
            world.join(name)
        assert world.run(FORMED_S, until=world.at_rest), "it does not form"
        change(world)
        for _ in range(chance.choice([1, 1, 2])):
            world.run(chance.choice([0.0, 0.1, 0.3]))
            world.crash_leader(after_effects=chance.randint(0, 25))
            world.run(chance.choice([0.3, 1.0]))
        world.leader.effects_left = None
        away_s = max(world.leaderless_s - world.clock.now_s, 0.0)
        rested = world.run(away_s + AGAIN_S, until=world.at_rest)
        ended = [name for name, member in world.members.items() if member.failed]
        assert not ended, f"{change.__name__}: {ended} ended"
        assert rested, f"{change.__name__}: not at rest: {world.leader.job.reason}"


def simulate_outage(seed: int) -> None:
    """Run `simulate_failover` with a time without a leader that exceeds all limits of members.

    That time must not count for the members, as only a leader could answer them.
    """
    chance = random.Random(f"outage {seed}")
    change = CHANGES[seed % len(CHANGES)]
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    world.leaderless_times_s = [2 * world.limits.join_s + 20.0]
    with _with_log(world, f"outage seed {seed}"):
        for name in ("a", "b", "c"):
            world.join(name)
        assert world.run(FORMED_S, until=world.at_rest), "it does not form"
        change(world)
        world.run(chance.choice([0.0, 0.1, 0.3]))
        world.crash_leader(after_effects=chance.randint(0, 25))
        world.run(1.0)
        world.leader.effects_left = None
        away_s = max(world.leaderless_s - world.clock.now_s, 0.0)
        rested = world.run(away_s + LATER_S, until=world.at_rest)
        # A member that was never admitted does not wait for ever.
        ended = [n for n, member in world.members.items() if member.failed and member.core.admitted]
        assert not ended, f"{change.__name__}: {ended} ended"
        assert rested, f"{change.__name__}: not at rest: {world.leader.job.reason}"


def simulate_crash_loop(seed: int) -> None:
    """Kill each leader within seconds, for minutes, with various pauses before the next one.

    Members that train stay in their generation throughout; new members are in the next one.
    """
    chance = random.Random(f"crash loop {seed}")
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    world.leaderless_times_s = [0.5, 3.0, 2 * world.limits.join_s]
    with _with_log(world, f"crash loop seed {seed}"):
        for name in ("a", "b", "c"):
            world.join(name)
        assert world.run(FORMED_S, until=world.at_rest), "it does not form"
        formed = world.leader.job.last_generation
        for _ in range(CRASHES):
            world.kill_leader()
            away_s = max(world.leaderless_s - world.clock.now_s, 0.0)
            world.run(away_s + chance.choice([0.1, 0.5, 1.5, 3.0]))
        assert world.leader.job.last_generation == formed, "another generation was formed"
        comes = chance.random() < 0.5
        if comes:
            world.join("d")
            world.run(chance.choice([0.0, 0.1, 0.3]))
            world.crash_leader(after_effects=chance.randint(0, 12))
            world.run(1.0)
        world.leader.effects_left = None
        away_s = max(world.leaderless_s - world.clock.now_s, 0.0)
        rested = world.run(away_s + LATER_S, until=world.at_rest)
        ended = [n for n, member in world.members.items() if member.failed and member.core.admitted]
        assert not ended, f"{ended} ended"
        assert rested, f"not at rest: {world.leader.job.reason}"
        assert world.leader.job.last_generation == formed or comes, "another generation was formed"


def simulate_pause(seed: int) -> None:
    """Pause a member for long while leaders die and another member may join: all must wait."""
    chance = random.Random(f"pause {seed}")
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    with _with_log(world, f"pause seed {seed}"):
        for name in ("a", "b", "c"):
            world.join(name)
        assert world.run(FORMED_S, until=world.at_rest), "it does not form"
        world.pause(chance.choice("abc"), for_s=PAUSE_S, limit_s=2 * PAUSE_S)
        for _ in range(chance.choice([1, 2])):
            world.run(chance.choice([0.1, 0.5, 2.0]))
            world.crash_leader(after_effects=chance.randint(0, 10))
            world.run(3.0)
        world.leader.effects_left = None
        if chance.random() < 0.5:
            world.join("d")
        world.run(PAUSE_S)
        rested = world.run(AGAIN_S, until=world.at_rest)
        ended = [name for name, member in world.members.items() if not member.living]
        assert not ended, f"{ended} ended"
        assert rested, f"not at rest: {world.leader.job.reason}"


def simulate_slow_start(seed: int) -> None:
    """Join a member after the others were brought up and before they begin a step."""
    chance = random.Random(f"slow start {seed}")
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    step = chance.choice([0, 20])
    breaks = chance.random() < 0.5
    with _with_log(world, f"slow start seed {seed}"):
        for name in ("a", "b"):
            world.join(name, step=step)
        if breaks:
            assert world.run(FORMED_S, until=world.at_rest), "it does not form"
            world.kill("b", seen_by_launcher=True)
        world.ready_reply_s = 1.0
        world.run(chance.uniform(0.0, 1.0))
        world.join("c")
        world.run(chance.uniform(1.0, 2.0))
        world.ready_reply_s = 0.0
        assert world.run(LATER_S, until=world.at_rest), f"not at rest: {world.leader.job.reason}"
        ended = [name for name, member in world.members.items() if member.failed]
        assert not ended, f"{ended} ended"


def simulate_state_lost(seed: int) -> None:
    """Kill all members with state, and the leader; another member that joins must not start from
    initial values."""
    chance = random.Random(f"state lost {seed}")
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    with _with_log(world, f"state lost seed {seed}"):
        for name in ("a", "b"):
            world.join(name)
        assert world.run(FORMED_S, until=lambda: world.has_committed), "it does not train"
        faults: list[Callable[[], object]] = [
            lambda: world.kill("a", seen_by_launcher=True),
            lambda: world.kill("b", seen_by_launcher=True),
            lambda: world.crash_leader(after_effects=chance.randint(0, 10)),
            lambda: world.join("c"),
        ]
        chance.shuffle(faults)
        for fault in faults:
            fault()
            world.run(chance.choice([0.0, 0.1, 0.5]))
        world.calm()
        assert world.run(30.0, until=world.at_rest), f"not at rest: {world.leader.job.reason}"


__all__ = [
    "PAUSE_S",
    "simulate_failover",
    "simulate_outage",
    "simulate_pause",
    "simulate_slow_start",
    "simulate_state_lost",
]
