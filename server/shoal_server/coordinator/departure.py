"""The shutdown of a coordinator, which keeps leading while members drain.

A preemption or the stop of a service signals all processes at once. Without a coordinator, members
could not agree on a last checkpoint.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog

from shoal_server.coordinator.jobs.registry import Registry

log = structlog.get_logger(__name__)

NOTICE_S = 5.0
"""Time for members to handle a signal and to ask for a drain, after the operation in progress."""
ASK_AGAIN_S = 0.1


@dataclass(frozen=True)
class Presence:
    """Members and unconfirmed changes of all jobs."""

    num_members: int = 0
    num_draining: int = 0
    num_writing: int = 0
    """Number of jobs with changes that etcd has not confirmed."""


def why_stay(presence: Presence, since_order_s: float, drain_s: float) -> str:
    """Reason why an ending coordinator stays; empty: it may end."""
    if since_order_s >= drain_s:
        return ""
    if presence.num_draining:
        return f"{presence.num_draining} of {presence.num_members} members drain"
    if presence.num_writing:
        return f"etcd has not confirmed the changes of {presence.num_writing} jobs"
    if presence.num_members and since_order_s < NOTICE_S:
        return f"{presence.num_members} members may have got a signal to end, too"
    return ""


async def wait_for_drains(registry: Registry, drain_s: float) -> None:
    """Wait until no member drains and etcd has confirmed all changes, but at most `drain_s`.
    Members have NOTICE_S to begin to drain. Return at once if this coordinator does not lead.

    A coordinator that is deposed meanwhile decides by its last count of members: it may be elected
    again while they drain.
    """
    began_s, logged_reason, presence = time.monotonic(), "", _presence(registry, Presence())
    while reason := why_stay(presence, time.monotonic() - began_s, drain_s):
        if reason != logged_reason:
            log.info("coordinator_stop_delayed", reason=reason, drain_s=drain_s)
        logged_reason = reason
        await asyncio.sleep(ASK_AGAIN_S)
        presence = _presence(registry, presence)
    if presence.num_draining:
        log.warning(
            "coordinator_stopped_during_drain", num_members=presence.num_draining, drain_s=drain_s
        )


def _presence(registry: Registry, before: Presence) -> Presence:
    """Count the members; return `before` while this coordinator does not lead."""
    if not registry.leads:
        return before
    actors = registry.actors()
    tables = [actor.job.table for actor in actors]
    return Presence(
        num_members=sum(len(table.members) for table in tables),
        num_draining=sum(len(table.draining) for table in tables),
        num_writing=sum(actor.is_writing for actor in actors),
    )
