"""Ends of memberships, as the launcher's board shows them."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from support.clusters.coordinator_world import entered, propose, served
from support.clusters.memory_store import MemoryStore

from shoal_client.liveness.beat_board import BeatBoard, BeatSlot, MembershipEnding
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import (
    DeadlineExceeded,
    Fenced,
    GenerationBroken,
    InternalError,
    InvalidSpec,
    JobFinished,
    PeersUnreachable,
    ProposalConflict,
    ShoalError,
    Unavailable,
)
from shoal_proto.v1.membership_pb2 import Prepare, Rejection
from shoal_server.core.limits import Limits
from shoal_server.core.processes import MemberProcess

QUICK = Limits(heartbeat_s=0.1, join_s=14.0)
SLOW = Limits(heartbeat_s=5.0)
"""A long interval: no heartbeat comes between a loss and the test's next action."""
WITHIN_S = 20.0


@pytest.fixture
def slot() -> Iterator[BeatSlot]:
    with BeatBoard(1) as board:
        yield board.slots[0]


@pytest.fixture
def other_slot() -> Iterator[BeatSlot]:
    with BeatBoard(1) as board:
        yield board.slots[0]


def who(membership: MemberSession) -> MemberProcess:
    return MemberProcess(membership.token.member_id, membership.token.incarnation)


async def until_failed(membership: MemberSession) -> None:
    """Wait until the heartbeat thread has found that the membership failed."""
    assert await asyncio.to_thread(membership.wait_generation_over, 0, WITHIN_S)


def await_drain(membership: MemberSession) -> None:
    """Wait until the membership's thread has noticed the wish to leave."""
    give_up_s = time.monotonic() + WITHIN_S
    while not membership.draining:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


async def test_a_lost_member_is_fenced(slot: BeatSlot) -> None:
    """The member's own heartbeat finds the loss, whatever its script does then. A new incarnation
    in the same process starts over."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        assert slot.ending is MembershipEnding.UNKNOWN
        await world.coordinator.registry.declare_lost("j", who(member), "a test says so")
        await until_failed(member)
        assert slot.ending is MembershipEnding.FENCED
        await asyncio.to_thread(world.client("a", beat_slot=slot).join)
        assert slot.ending is MembershipEnding.UNKNOWN


async def test_a_member_that_learns_of_its_loss_while_leaving_is_fenced(slot: BeatSlot) -> None:
    """The script's error came from elsewhere, for example from a server or a peer."""
    async with served(MemoryStore(), SLOW) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        await world.coordinator.registry.declare_lost("j", who(member), "a test says so")
        await asyncio.to_thread(member.leave, completed=False, reason="some error")
        assert slot.ending is MembershipEnding.FENCED


async def test_a_member_that_leaves_by_itself_is_not_fenced(slot: BeatSlot) -> None:
    """The refusal of a heartbeat that was in progress when the member left does not count as a
    fence."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        under_way = slot.claimed(os.getpid())
        assert under_way is not None
        await asyncio.to_thread(member.leave, completed=False, reason="some error")
        slot.record_refused_heartbeat(under_way, Fenced("no member any more"))
        assert slot.ending is MembershipEnding.UNKNOWN


async def test_a_member_that_has_completed_its_launchers_job_says_so(slot: BeatSlot) -> None:
    """The launcher then knows that a process which is killed later is not to be started again."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("b", job="k", beat_slot=slot)
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(member.leave, completed=True, reason="its work is done")
        assert slot.ending is MembershipEnding.COMPLETED


async def test_the_end_of_a_replaced_member_is_final(slot: BeatSlot) -> None:
    """Two processes with one name would replace each other again and again."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(world.client("a").join)
        await until_failed(member)
        assert slot.ending is MembershipEnding.REFUSED


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (ProposalConflict("members differ"), MembershipEnding.REFUSED),
        (DeadlineExceeded("no generation formed"), MembershipEnding.PASSING),
        (Unavailable("nobody is there"), MembershipEnding.PASSING),
        (GenerationBroken("generation 3 hung"), MembershipEnding.PASSING),
        (PeersUnreachable("a firewall"), MembershipEnding.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ShoalError) else value.name,
)
async def test_each_error_of_the_trainer_has_its_ending(
    slot: BeatSlot, error: ShoalError, ending: MembershipEnding
) -> None:
    """The launcher learns if the next process would end with the same error, and if it would
    not."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        member.failed(error)
        assert slot.ending is ending


async def test_an_error_of_the_script_after_the_jobs_end_is_a_failure(slot: BeatSlot) -> None:
    """The job is finished, but the run is no success: a checkpoint, for example, is missing."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        slot.end(MembershipEnding.FINISHED)
        member.failed(InvalidSpec("session.state_dict was made by this member alone"))
        assert slot.ending is MembershipEnding.REFUSED


async def test_the_error_of_a_member_that_was_asked_to_leave_ends_a_drain(slot: BeatSlot) -> None:
    """A launcher does not start a worker again that an operator has asked to leave."""
    async with served(MemoryStore(), SLOW) as world:
        member = world.client("a", beat_slot=slot)
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(propose, member)
        other = await world.joined("b")
        await asyncio.gather(entered(member, 0), entered(other, 0))
        # The other member takes no step, so that the drain goes on.
        member.drain("an operator asked for it")
        await asyncio.to_thread(await_drain, member)
        assert slot.ending is MembershipEnding.UNKNOWN
        member.failed(Unavailable("the disk is full"))
        assert slot.ending is MembershipEnding.DRAINED
        slot.end(MembershipEnding.COMPLETED)  # lets the next ending be set
        member.failed(ProposalConflict("members differ"))
        assert slot.ending is MembershipEnding.REFUSED


async def test_joining_a_finished_job_again_is_an_error_of_the_script(
    slot: BeatSlot, other_slot: BeatSlot
) -> None:
    """A second session of a script is a fault of the script. Another member merely came too
    late."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("twice", desired=1, beat_slot=slot)
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(propose, member)
        await entered(member, 0)
        await asyncio.to_thread(member.leave, completed=True, reason="all is trained")
        with pytest.raises(JobFinished, match="by an earlier session of this process"):
            await asyncio.to_thread(world.client("twice", beat_slot=slot).join)
        assert slot.ending is MembershipEnding.REFUSED
        with pytest.raises(JobFinished, match="job j is finished; "):
            await asyncio.to_thread(world.client("late", beat_slot=other_slot).join)
        assert other_slot.ending is MembershipEnding.FINISHED


async def test_a_restarted_script_whose_first_job_is_finished_fails(slot: BeatSlot) -> None:
    """The others have finished that job, so the script would never reach the jobs after it."""
    async with served(MemoryStore(), QUICK) as world:
        member = world.client("a", desired=1)
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(propose, member)
        await entered(member, 0)
        await asyncio.to_thread(member.leave, completed=True, reason="all is trained")
        late = world.session(replace(world.member("b", beat_slot=slot), launcher_job="folds"))
        with pytest.raises(JobFinished, match=r"by others; .*Several jobs in one script"):
            await asyncio.to_thread(late.join)
        assert slot.ending is MembershipEnding.REFUSED


@pytest.mark.long
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_validator_that_raises_fails_its_member_at_once(slot: BeatSlot) -> None:
    """A validator may call a storage or a network, and raise any exception."""

    def judge(prepare: Prepare) -> Sequence[Rejection]:
        raise PermissionError("the bucket is closed")

    async with served(MemoryStore(), QUICK) as world:
        member = world.session(world.member("a", desired=1, beat_slot=slot), judge=judge)
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(propose, member)
        with pytest.raises(InternalError, match="shoal-member") as raised:
            await asyncio.to_thread(member.await_generation, 0, WITHIN_S)
        assert "the bucket is closed" in raised.value.seen
