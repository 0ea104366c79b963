"""Processes halted by a signal: found at once, and fenced if they continue too late."""

from support.members.job_world import World

from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.membership.events import RefusalKind


def running(*names: str) -> World:
    w = World(JobSpec(job="j", desired_members=len(names)))
    for name in names:
        w.join(name)
    w.run(1.0)
    w.train(3)
    return w


def test_a_halted_member_is_lost_after_the_halt_limit() -> None:
    """The launcher's report is enough: the job does not wait for heartbeats to fail."""
    w = running("a", "b", "c")
    w.halt("b")
    w.run(1.0 + w.job.limits.halt_s / 2)
    assert w.roster() == ["a", "b", "c"]
    w.run(1.0 + w.job.limits.halt_s + 0.001)
    assert w.roster() == ["a", "c"]


def test_a_short_halt_costs_nothing() -> None:
    """SIGSTOP and SIGCONT in quick succession, as a debugger sends them, change no generation."""
    w = running("a", "b", "c")
    w.halt("b")
    w.run(1.0 + w.job.limits.halt_s / 2)
    w.go_on("b")
    w.run(3.0)
    assert w.roster() == ["a", "b", "c"]
    assert w.job.last_generation == 1


def test_one_that_comes_back_too_late_is_fenced() -> None:
    """Calls of the fenced process are refused with the current generation's number."""
    w = running("a", "b", "c")
    frozen = w.members["b"]
    w.halt("b")
    w.run(2.0)
    generation = w.job.last_generation
    frozen.paused = False
    w._report_broken(frozen)
    w.run(3.0)
    assert frozen.refused is not None
    assert frozen.refused.kind == RefusalKind.FENCED
    assert f"generation is {generation}" in frozen.refused.expected
    assert w.job.last_generation == generation
    assert w.roster() == ["a", "c"]
