"""Output of workers is read through the coordinator, which requests it from launchers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc.aio
import pytest
from support.clusters.coordinator_world import Served, propose, served
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.coordinators import Coordinators
from shoal_client.host.output_tail import OutputTail
from shoal_client.host.outputs import HostOutputs
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import AccessDenied, InvalidSpec, Overloaded, Unavailable, UnknownMember
from shoal_proto.secrets import new_secret
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import outputs_pb2 as pb
from shoal_proto.v1.outputs_pb2_grpc import OutputsStub
from shoal_server.coordinator.jobs import outputs
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.views import OutputView

LAUNCH, JOB = new_secret(), new_secret()
WITHIN_S = 20.0


@contextmanager
def launcher(
    world: Served, *, secret: str = LAUNCH, job_secret: str = "", member: str = "a", job: str = "j"
) -> Iterator[OutputTail]:
    """Connect a launcher whose worker has printed what is added to the yielded tail."""
    coordinators, tail = Coordinators([world.address]), OutputTail()
    owner = pb.OutputOwner(member_id=member, launch_secret=secret)
    request = pb.ServeOutputRequest(job=job, host="h", members=[owner], job_secret=job_secret)
    try:
        with HostOutputs(coordinators, request, {member: tail}):
            yield tail
    finally:
        coordinators.close()


@asynccontextmanager
async def launched(world: Served, **named: str) -> AsyncIterator[OutputTail]:
    """Connect a launcher in a thread, and wait until the coordinator has its stream."""
    made = launcher(world, **named)  # type: ignore[arg-type]
    before = world.coordinator.view.outputs.num_served
    tail = await asyncio.to_thread(made.__enter__)
    try:
        await until_served(world, before + 1)
        yield tail
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)


async def until_served(world: Served, num_members: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if world.coordinator.view.outputs.num_served == num_members:
                return
            await asyncio.sleep(0.005)


async def joined(world: Served, **secrets: str) -> MemberSession:
    member = world.client("a", desired=1, **{"launch_secret": LAUNCH, **secrets})  # type: ignore[arg-type]
    await asyncio.to_thread(member.join)
    await asyncio.to_thread(propose, member)
    return member


async def read(
    world: Served,
    member: str = "a",
    *,
    after: str | None = None,
    before: str | None = None,
    who: CallerProof | None = None,
) -> OutputView:
    return await world.coordinator.view.output("j", member, who or CallerProof(), after, before)


async def test_lines_are_read_as_they_are_printed() -> None:
    """Each read returns the lines since the last one, without escape sequences."""
    async with served(MemoryStore()) as world, launched(world) as tail:
        await joined(world)
        tail.add("\x1b[31mone\x1b[0m")
        first = await read(world)
        assert (first.lines, first.host, first.is_live, first.before) == (("one",), "h", True, None)
        assert (await read(world, after=first.after)).lines == ()
        tail.add("two")
        since = await read(world, after=first.after)
        assert (since.lines, since.has_gap) == (("two",), False)


async def test_a_large_output_is_read_in_parts() -> None:
    async with served(MemoryStore()) as world, launched(world) as tail:
        await joined(world)
        for number in range(30_000):
            tail.add(f"line {number}")
        part = await read(world)
        lines = list(part.lines)
        assert len("\n".join(lines)) < outputs.PART_BYTES
        while part.before is not None:
            part = await read(world, before=part.before)
            lines = [*part.lines, *lines]
        assert lines == [f"line {number}" for number in range(30_000)]


async def test_lines_that_are_no_longer_kept_are_reported_as_a_gap() -> None:
    async with served(MemoryStore()) as world, launched(world) as tail:
        await joined(world)
        tail.add("first")
        seen = await read(world)
        for _ in range(20):
            tail.add("x" * 100_000)
        assert (await read(world, after=seen.after)).has_gap


async def test_output_is_not_stored_in_etcd() -> None:
    store = MemoryStore()
    async with served(store) as world, launched(world) as tail:
        await joined(world)
        tail.add("a line of its own")
        assert (await read(world)).lines == ("a line of its own",)
        kept = (await store.range("/shoal/")).items
        assert kept and not [each for each in kept if "a line of its own" in str(each.value)]


async def test_output_comes_only_from_the_launcher_that_started_the_member() -> None:
    """A launcher that serves a member has to know the secret with which the member was started."""
    async with served(MemoryStore()) as world, launched(world, secret=new_secret()) as forged:
        await joined(world)
        forged.add("forged")
        with pytest.raises(UnknownMember, match="no connected launcher started"):
            await read(world)
        async with launched(world) as tail:
            tail.add("its own")
            assert (await read(world)).lines == ("its own",)


async def test_an_unknown_member_and_two_positions_at_once_are_refused() -> None:
    async with served(MemoryStore()) as world, launched(world) as tail:
        await joined(world)
        tail.add("a line")
        with pytest.raises(UnknownMember, match="no output of b of job j is kept"):
            await read(world, "b")
        position = (await read(world)).after
        with pytest.raises(InvalidSpec, match="both `after` and `before`"):
            await read(world, after=position, before=position)


async def test_the_last_lines_stay_readable_once_the_launcher_has_ended() -> None:
    """The last lines are kept, even of a member that has left, until the job is reset."""
    async with served(MemoryStore()) as world:
        async with launched(world) as tail:
            member = await joined(world)
            tail.add("the loss is nan")
            seen = await read(world)
            for number in range(5000):
                tail.add(f"line {number}")
            await asyncio.to_thread(member.leave, completed=True, reason="it is done")
        await until_served(world, 0)
        left = await read(world)
        assert not left.is_live and left.lines[-1] == "line 4999" and left.before is None
        assert sum(len(line) + 1 for line in left.lines) <= 16 * 1024
        since = await read(world, after=seen.after)
        assert since.has_gap and since.lines == left.lines
        assert (await read(world, after=left.after)).lines == ()
        assert (await read(world, before=left.after)).lines == left.lines
        await world.coordinator.resetting.reset("j")
        async with launched(world, secret=new_secret(), member="other"):
            member = world.client("other", desired=1)
            await asyncio.to_thread(member.join)
            with pytest.raises(UnknownMember):
                await read(world)


async def test_the_oldest_last_lines_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MAX_KEPT_BYTES", 100)
    async with served(MemoryStore()) as world:
        await joined(world)
        for name in ("b", "c"):
            async with launched(world, member=name) as tail:
                tail.add(name * 59)
            await until_served(world, 0)
        assert (await read(world, "c")).lines == ("c" * 59,)
        with pytest.raises(UnknownMember):
            await read(world, "b")


async def test_a_worker_that_fails_before_its_launcher_is_connected_leaves_last_lines() -> None:
    def fails_at_once(world: Served) -> None:
        with launcher(world) as tail:
            tail.add("no such file")

    async with served(MemoryStore()) as world:
        await joined(world)
        await asyncio.to_thread(fails_at_once, world)
        await until_served(world, 0)
        assert (await read(world)).lines == ("no such file",)


async def test_last_lines_are_refused_from_a_launcher_that_does_not_serve_the_member() -> None:
    async with served(MemoryStore()) as world, launched(world):
        owner = pb.OutputOwner(member_id="a", launch_secret=new_secret())
        last = pb.LastOutput(owner=owner, part=pb.OutputPart(data=b"forged\n", stop=7))
        async with grpc.aio.insecure_channel(world.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await OutputsStub(channel).Keep(pb.KeepOutputRequest(job="j", last=[last]))
        assert isinstance(from_rpc_error(refused.value, "it"), AccessDenied)


async def test_output_of_a_job_with_a_secret_needs_the_secret_or_a_known_caller() -> None:
    """No output is requested from launchers without the secret."""
    async with (
        served(MemoryStore()) as world,
        launched(world, job_secret=JOB) as tail,
        launched(world) as without,
    ):
        await joined(world, job_secret=JOB)
        without.add("forged")
        tail.add("a line")
        with pytest.raises(AccessDenied, match="job j has a secret"):
            await read(world)
        assert (await read(world, who=CallerProof(is_known=True))).lines == ("a line",)
        assert (await read(world, who=CallerProof(job_secret=JOB))).lines == ("a line",)


async def test_output_of_a_quarantined_job_is_not_shown() -> None:
    async with served(MemoryStore()) as world, launched(world) as tail:
        await joined(world)
        tail.add("a line")
        world.coordinator.registry.quarantine("j", ValueError("a record that does not parse"))
        with pytest.raises(Unavailable, match="while it is quarantined"):
            await read(world)


async def test_reads_from_a_hung_launcher_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads fail after a time limit, and beyond a number of waiting ones at once (Overloaded)."""
    monkeypatch.setattr(outputs, "ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(outputs, "MAX_WAITING", 3)
    async with served(MemoryStore()) as world:
        await joined(world)
        async with grpc.aio.insecure_channel(world.address) as channel:
            owner = pb.OutputOwner(member_id="a", launch_secret=LAUNCH)
            request = pb.ServeOutputRequest(job="j", host="h", source="ab", members=[owner])
            stream = OutputsStub(channel).Serve(request)
            await stream.read()
            with pytest.raises(Unavailable, match="the launcher of a does not answer"):
                await read(world)
            asked = await asyncio.gather(*(read(world) for _ in range(9)), return_exceptions=True)
            assert {type(each) for each in asked} == {Unavailable, Overloaded}
            stream.cancel()
        await until_served(world, 0)


@pytest.mark.parametrize("leaves_lines", [True, False], ids=["with last lines", "without"])
async def test_a_read_that_waits_when_the_launcher_ends_gets_its_last_lines(
    leaves_lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the launcher's stream ends the wait; without last lines the read fails.
    Regression: the call took 3 s and ended as Unavailable, although the lines were there."""
    monkeypatch.setattr(outputs, "ANSWER_WITHIN_S", 10 * WITHIN_S)
    async with (
        served(MemoryStore()) as world,
        grpc.aio.insecure_channel(world.address) as channel,
    ):
        await joined(world)
        stub, owner = OutputsStub(channel), pb.OutputOwner(member_id="a", launch_secret=LAUNCH)
        stream = stub.Serve(pb.ServeOutputRequest(job="j", host="h", source="ab", members=[owner]))
        await stream.read()
        reading = asyncio.create_task(read(world))
        await stream.read()  # the coordinator's request
        if leaves_lines:
            last = pb.LastOutput(owner=owner, part=pb.OutputPart(data=b"the end\n", stop=8))
            await stub.Keep(pb.KeepOutputRequest(job="j", last=[last]))
        stream.cancel()
        async with asyncio.timeout(WITHIN_S):
            if leaves_lines:
                left = await reading
                assert (left.lines, left.is_live) == (("the end",), False)
            else:
                with pytest.raises(Unavailable, match="when its stream ended"):
                    await reading


async def test_an_answer_with_an_unknown_ticket_is_ignored() -> None:
    async with served(MemoryStore()) as world, launched(world) as tail:
        await joined(world)
        tail.add("true")
        async with grpc.aio.insecure_channel(world.address) as channel:
            part = pb.OutputPart(data=b"forged\n", stop=7)
            forged = pb.GiveOutputRequest(job="j", member_id="a", ticket="0" * 32, part=part)
            await OutputsStub(channel).Give(forged)
            assert (await read(world)).lines == ("true",)


async def test_launchers_serve_the_next_leader() -> None:
    """The next leader reads lines that no coordinator has stored."""
    store = MemoryStore()
    async with served(store) as world, launched(world) as tail:
        await joined(world)
        tail.add("a line")
        await world.coordinator.step_down()
        await world.coordinator.lead(())
        await until_served(world, 1)
        assert (await read(world)).lines == ("a line",)


async def test_a_launcher_with_an_invalid_job_source_or_owner_is_refused() -> None:
    async with (
        served(MemoryStore()) as world,
        grpc.aio.insecure_channel(world.address) as channel,
    ):
        for request in (
            pb.ServeOutputRequest(job="../j", source="ab"),
            pb.ServeOutputRequest(job="j", source="a b"),
            pb.ServeOutputRequest(job="j", source="ab", members=[pb.OutputOwner()]),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await OutputsStub(channel).Serve(request).read()
            assert isinstance(from_rpc_error(refused.value, "it"), InvalidSpec)
