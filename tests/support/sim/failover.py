"""Seeded runs in which the leader dies amid one change of a job, and nothing else fails.

Whatever the old leader alone knew, its members say again. So the change comes about all the same,
without waiting for any time limit.
"""

import random
from collections.abc import Callable

from support.sim.world import SimWorld

from shoal_server.core.generations.roster import JobSpec

FORMED_S, AGAIN_S = 4.0, 4.0
"""Less than any limit by which members agree, stop or come up: see `shoal_server.core.limits`."""

LATER_S = 10.0
"""The same after an outage: nobody's launcher tells of a loss any more, silence does."""


def joins(world: SimWorld) -> None:
    """A planned change, in which nobody is lost."""
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


def simulate_failover(seed: int) -> None:
    """One run. Raises AssertionError with the story."""
    chance = random.Random(f"failover {seed}")
    change = CHANGES[seed % len(CHANGES)]
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    try:
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
    except AssertionError as error:
        story = "\n".join(world.story[-60:])
        raise AssertionError(f"{error}\nfailover seed {seed}\n{story}") from error


def simulate_outage(seed: int) -> None:
    """The same where nobody leads for longer than any member would wait for others.

    No time passes for the members meanwhile: what they wait for nobody could tell them.
    """
    chance = random.Random(f"outage {seed}")
    change = CHANGES[seed % len(CHANGES)]
    spec = JobSpec(job="j", min_members=1, max_members=5, desired_members=2)
    world = SimWorld(spec, seed=seed)
    world.faulty = world.store.loses_answers = False
    world.leaderless_times_s = [2 * world.limits.join_s + 20.0]
    try:
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
        # One that nobody has admitted does not wait for ever.
        ended = [n for n, member in world.members.items() if member.failed and member.core.admitted]
        assert not ended, f"{change.__name__}: {ended} ended"
        assert rested, f"{change.__name__}: not at rest: {world.leader.job.reason}"
    except AssertionError as error:
        story = "\n".join(world.story[-60:])
        raise AssertionError(f"{error}\noutage seed {seed}\n{story}") from error


__all__ = ["simulate_failover", "simulate_outage"]
