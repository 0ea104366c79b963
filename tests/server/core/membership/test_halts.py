"""Processes halted by a signal: they are lost soon, and fenced if they continue too late."""

from functools import partial

from support.members.job_world import training

from shoal_server.core.membership.events import RefusalKind

running = partial(training, step=3)


def test_a_halted_member_is_lost_after_the_halt_limit() -> None:
    """The limit counts from the launcher's report of the halt: the job does not wait until
    heartbeats are missing."""
    w = running("a", "b", "c")
    w.halt("b")
    w.run(1.0 + w.job.limits.halt_s / 2)
    assert w.roster() == ["a", "b", "c"]
    w.run(1.0 + w.job.limits.halt_s + 0.001)
    assert w.roster() == ["a", "c"]


def test_a_short_halt_changes_no_generation() -> None:
    """A debugger sends SIGSTOP and SIGCONT in quick succession."""
    w = running("a", "b", "c")
    w.halt("b")
    w.run(1.0 + w.job.limits.halt_s / 2)
    w.go_on("b")
    w.run(3.0)
    assert w.roster() == ["a", "b", "c"]
    assert w.job.last_generation == 1


def test_a_process_that_continues_too_late_is_fenced() -> None:
    """The refusal has the number of the current generation."""
    w = running("a", "b", "c")
    frozen = w.members["b"]
    w.halt("b")
    w.run(2.0)
    generation = w.job.last_generation
    frozen.paused = False
    w.report_broken(frozen)
    w.run(3.0)
    assert frozen.refused is not None
    assert frozen.refused.kind == RefusalKind.FENCED
    assert f"generation is {generation}" in frozen.refused.expected
    assert w.job.last_generation == generation
    assert w.roster() == ["a", "c"]
