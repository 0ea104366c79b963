"""A seeded run of a job: members, leaders and etcd under random faults, then without faults."""

import random
import traceback
from collections.abc import Callable

from support.sim.failover import PAUSE_S
from support.sim.releases import MARK, mixed, uniform
from support.sim.world import FIELDS, SimWorld

from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.membership.phases import Phase

FAULTS = (
    ["kill"] * 4
    + ["join"] * 5
    + ["rejoin", "halt", "drain", "crash leader", "crash midway", "pause"] * 3
    + ["odd", "picky", "cut", "halt leader", "etcd", "ahead", "clumsy", "dawdle"] * 2
)


def _disturb(world: SimWorld, chance: random.Random, fresh: int) -> None:
    """Cause one random fault or arrival."""
    names = sorted(name for name, member in world.members.items() if member.living)
    name = chance.choice(names) if names else ""
    coin = chance.random() < 0.5
    arrivals: dict[str, Callable[[], object]] = {
        "join": lambda: world.join(f"m{fresh}"),
        "odd": lambda: world.join(f"odd{fresh}", {**FIELDS, "schema": "other"}),
        "picky": lambda: world.join(f"picky{fresh}", rejects=True),
        "clumsy": lambda: world.join(f"clumsy{fresh}", num_failures=chance.choice([1, 2, 99])),
        # A member that starts from a checkpoint.
        "ahead": lambda: world.join(f"ahead{fresh}", step=chance.randint(1, 60)),
        "crash leader": world.crash_leader,
        "crash midway": lambda: world.crash_leader(after_effects=chance.randint(1, 25)),
        "halt leader": lambda: world.halt_leader(chance.choice([0.3, 2.0, 4.0])),
        "etcd": lambda: world.stop_etcd(chance.choice([0.2, 1.0, 8.0])),
        "dawdle": lambda: world.dawdle(chance.choice([0.3, 2.0])),
    }
    losses: dict[str, Callable[[], object]] = {
        "kill": lambda: world.kill(name, seen_by_launcher=coin),
        "rejoin": lambda: world.join(name),  # a new process under an old name
        "halt": lambda: world.halt(
            name, chance.choice([0.02, 0.3, 1.0, 5.0]), seen_by_launcher=coin
        ),
        "drain": lambda: world.drain(name, by_operator=coin),
        "pause": lambda: world.pause(
            name, for_s=chance.choice([0.1, 2.0, PAUSE_S]), limit_s=chance.choice([5.0, 100.0])
        ),
        "cut": lambda: world.cut_off(name, f"m{fresh}", back=coin),
    }
    fault = chance.choice(FAULTS)
    if fault in arrivals:
        arrivals[fault]()
    elif name:
        losses[fault]()


def _run(world: SimWorld, seed: int) -> None:
    chance = random.Random(f"faults {seed}")
    for name in ("a", "b", "c"):
        world.join(name)
    for fresh in range(chance.randint(1, 12)):
        world.run(chance.choice([0.0, 0.01, 0.1, 0.5, 1.5, 3.0]))
        _disturb(world, chance, fresh)
    world.run(chance.choice([0.0, 0.5]))
    world.calm()
    world.run(sum(code.for_s for each in world.members.values() for code in each.all_own_code))
    etcd_away_s = max(world.store.back_s - world.clock.now_s, 0.0)
    # Members that wait for a halted leader need time to find the next one.
    world.run(etcd_away_s + 4.0)
    limits = world.limits
    bound_s = 3 * limits.join_s + limits.collective_s
    rested = world.run(bound_s, until=world.at_rest)
    living = [m for m in world.members.values() if m.living]
    if not rested and 0 < len(living) < world.spec.min_members:
        # Too few members are left: add one.
        world.join("late")
        rested = world.run(bound_s, until=world.at_rest)
    job = world.leader.job
    if world.store.was_marked:
        assert MARK.items() <= world.store.state("j").items(), "what the next release wrote is gone"
    assert rested, f"not at rest: {job.phase}: {job.reason}"
    number, steps = job.last_generation, _steps(world)
    world.run(3.0)
    if world.total_steps is None and job.phase is not Phase.LOST:
        assert job.last_generation == number, f"changed again: {job.reason}"
        for name, step in _steps(world).items():
            assert step > steps[name] + 1, f"{name} does not train"


def _steps(world: SimWorld) -> dict[str, int]:
    running = world.leader.job.running
    return {n: m.step for n, m in world.members.items() if m.living and m.is_in(running)}


def simulate(seed: int, *, mixed_releases: bool | None = None) -> None:
    """Run one seed. Raises AssertionError with the log of the run. `mixed_releases`: processes are
    of two releases; None: in every fourth seed."""
    if mixed_releases is None:
        mixed_releases = seed % 4 == 3
    chance = random.Random(f"bounds {seed}")
    low = chance.choice([1, 1, 2])
    spec = JobSpec(job="j", min_members=low, max_members=chance.choice([3, 5]), desired_members=3)
    total = chance.choice([None, None, None, chance.randint(5, 60)])
    release_of = mixed(seed) if mixed_releases else uniform
    world = SimWorld(spec, seed=seed, total_steps=total, release_of=release_of)
    world.checkpoint_every = chance.choice([0, 0, 3])
    try:
        _run(world, seed)
    except Exception as error:
        story = "\n".join(world.story[-60:])
        what = f"{error}" if isinstance(error, AssertionError) else traceback.format_exc()
        raise AssertionError(f"{what}\nseed {seed}\n{story}") from error
