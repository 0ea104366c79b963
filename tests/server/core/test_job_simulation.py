"""Seeded runs with crashes, delays and joins; what must always hold is checked after each event."""

import os

import pytest
from job_world import FIELDS, World

from shoal_server.core.phases import Phase
from shoal_server.core.roster import JobSpec, Verdict

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "200"))


FAULTS = ["kill"] * 4 + ["join"] * 4 + ["odd", "rejoin", "train", "pause"] * 2 + ["complete"]


class Invariants:
    """What no schedule of faults may break."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before = (Phase.COLLECT, 0)

    def __call__(self) -> None:
        self._one_decision_a_generation()
        self._rosters_are_sound()
        self._members_got_what_was_written()
        self._refused_joiners_disturbed_nobody()

    def _one_decision_a_generation(self) -> None:
        for generation, records in self.world.written.items():
            verdicts = [r.verdict for r in records]
            assert verdicts in (
                [Verdict.COMMITTED],
                [Verdict.ABORTED],
                [Verdict.COMMITTED, Verdict.ABORTED],
            ), f"generation {generation}: {verdicts}"
            assert len({r.digest for r in records}) == 1, f"generation {generation}: two rosters"

    def _rosters_are_sound(self) -> None:
        job = self.world.job
        for roster in (job.running, job.attempt):
            if roster is None:
                continue
            ranks = [e.rank for e in roster.entries]
            assert ranks == list(range(len(ranks)))
            assert len(set(roster.member_ids)) == len(ranks)
            assert len(ranks) <= job.spec.max_members
            # Of a job that completes, members leave one by one.
            present = job.completing or all(e.member_id in job.members for e in roster.entries)
            assert present, "a lost member is in it"
        if job.running is not None:
            written = self.world.written[job.running.generation]
            assert written[-1].verdict is Verdict.COMMITTED

    def _members_got_what_was_written(self) -> None:
        for member in [*self.world.members.values(), *self.world.gone]:
            for generation, records in member.records.items():
                for record in records:
                    assert record in self.world.written[generation]

    def _refused_joiners_disturbed_nobody(self) -> None:
        for member in self.world.gone:
            if member.name.startswith("odd") and member.refused is not None:
                assert all(
                    not r.holds(member.name, member.incarnation)
                    for r in (self.world.job.running, self.world.job.attempt)
                    if r is not None
                )


def _disturb(world: World, fresh: int) -> None:
    """One random fault or arrival."""
    names = sorted(world.members)
    match world.random.choice(FAULTS):
        case "kill" if names:
            world.kill(world.random.choice(names), seen_by_launcher=world.random.random() < 0.5)
        case "join":
            world.join(f"m{fresh}")
        case "odd":
            world.join(f"odd{fresh}", {**FIELDS, "schema": "other"})
        case "rejoin" if names:
            world.join(world.random.choice(names))  # a new process under an old name
        case "train":
            world.train(max([m.begun for m in world.members.values()], default=0) + 1)
        case "pause" if names:
            world.members[world.random.choice(names)].paused = True
        case "complete" if names:
            world.complete(world.random.choice(names))
        case _:
            pass


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_any_schedule_ends_in_one_running_generation_of_all_who_live(seed: int) -> None:
    """Invariants hold at every event; once faults stop, the living train together."""
    spec = JobSpec(job="j", min_members=1, max_members=6, desired_members=3)
    world = World(spec, seed=seed, max_delay_s=0.05)
    world.check = Invariants(world)
    for name in ("a", "b", "c"):
        world.join(name)
    for fresh in range(world.random.randint(1, 12)):
        world.run(world.now_s + world.random.choice([0.0, 0.01, 0.1, 1.0]))
        _disturb(world, fresh)
    if not any(not m.paused for m in world.members.values()):
        world.join("last")
    # A paused process is found by its heartbeats, which are the edge's to watch.
    for name in [name for name, m in world.members.items() if m.paused]:
        world.kill(name, seen_by_launcher=True)
    limits = world.job.limits
    world.run(world.now_s + limits.join_s + limits.collective_s + limits.bring_up_s)
    story = "\n".join(world.log[-30:])
    living = sorted(world.members)
    if world.job.completing:
        for name in living:
            world.complete(name)
        world.run(world.now_s + limits.join_s)
        assert world.job.phase is Phase.FINISHED, f"seed {seed}: {world.job.reason}\n{story}"
        return
    if not living:
        assert world.job.running is None, story
        return
    assert world.is_running(), f"seed {seed}: {world.job.phase} ({world.job.reason})\n{story}"
    expected = len(living[: spec.max_members])
    assert len(world.roster()) == expected, f"seed {seed}: {living} vs {world.roster()}\n{story}"
    assert set(world.roster()) <= set(living)
