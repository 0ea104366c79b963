"""Phases of a job, and the table of transitions between them."""

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    COLLECT = "collect"
    PREPARE = "prepare"
    COMMITTED = "committed"
    RUNNING = "running"
    ABORTED = "aborted"
    FINISHED = "finished"
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"


OVER = frozenset({Phase.FINISHED, Phase.LOST, Phase.STOPPED, Phase.FAILED})
"""Phases of a job that is over: it has no members, and takes none."""


class Trigger(Enum):
    CHANGE_WANTED = "a change of a running generation is wanted"
    CHANGE_DROPPED = "no member wants the change any more"
    BROKEN = "the running generation broke"
    FROZEN = "the roster is drawn up"
    ACCEPTED = "all accepted the same digest"
    FAILED = "rejected, lost or timed out"
    READY = "every member's first collective passed"
    INTACT = "the previous generation still runs"
    BACKED_OFF = "time to try again"
    COMPLETED = "the work is done"
    STATE_LOST = "nobody holds the state that the job had reached"
    STOPPED = "an operator has stopped it"
    ABANDONED = "all members are gone for good"
    RETRIED = "an operator lets members join again"


TRANSITIONS: Mapping[tuple[Phase, Trigger], Phase] = {
    (Phase.RUNNING, Trigger.CHANGE_WANTED): Phase.COLLECT,
    (Phase.RUNNING, Trigger.BROKEN): Phase.COLLECT,
    (Phase.COLLECT, Trigger.CHANGE_DROPPED): Phase.RUNNING,
    (Phase.COLLECT, Trigger.BROKEN): Phase.COLLECT,
    (Phase.COLLECT, Trigger.FROZEN): Phase.PREPARE,
    (Phase.PREPARE, Trigger.ACCEPTED): Phase.COMMITTED,
    (Phase.PREPARE, Trigger.FAILED): Phase.ABORTED,
    (Phase.COMMITTED, Trigger.READY): Phase.RUNNING,
    (Phase.COMMITTED, Trigger.FAILED): Phase.ABORTED,
    (Phase.ABORTED, Trigger.INTACT): Phase.RUNNING,
    (Phase.ABORTED, Trigger.BACKED_OFF): Phase.COLLECT,
    (Phase.COLLECT, Trigger.COMPLETED): Phase.FINISHED,
    (Phase.PREPARE, Trigger.COMPLETED): Phase.FINISHED,
    (Phase.COMMITTED, Trigger.COMPLETED): Phase.FINISHED,
    (Phase.RUNNING, Trigger.COMPLETED): Phase.FINISHED,
    (Phase.ABORTED, Trigger.COMPLETED): Phase.FINISHED,
    (Phase.ABORTED, Trigger.STATE_LOST): Phase.LOST,
    (Phase.COLLECT, Trigger.STOPPED): Phase.STOPPED,
    (Phase.ABORTED, Trigger.STOPPED): Phase.STOPPED,
    (Phase.COLLECT, Trigger.ABANDONED): Phase.FAILED,
    (Phase.ABORTED, Trigger.ABANDONED): Phase.FAILED,
    (Phase.STOPPED, Trigger.RETRIED): Phase.COLLECT,
    (Phase.FAILED, Trigger.RETRIED): Phase.COLLECT,
    (Phase.LOST, Trigger.RETRIED): Phase.COLLECT,
}


class IllegalTransition(Exception):
    """Raised for a transition that is not in the table: a bug."""


def next_phase(phase: Phase, trigger: Trigger) -> Phase:
    """Return the phase that `trigger` leads to. Raises IllegalTransition."""
    try:
        return TRANSITIONS[phase, trigger]
    except KeyError:
        raise IllegalTransition(f"{trigger.name} in {phase.name}") from None
