"""A name is not permission: a launcher needs its secret, and a member the secret of its job."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import httpx
import pytest
from support.clusters.coordinator_world import Served, entered, propose, served
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore

from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import AccessDenied, ShoalError, Unavailable, UnknownMember
from shoal_proto.incarnation import new_incarnation, public_id
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.secrets import digest_of, new_secret
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.coordinator.jobs.operations import JobOperations
from shoal_server.etcd import keys
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer

LAUNCH, JOB = new_secret(), new_secret()
WITHIN_S = 10.0


async def training(world: Served, **secrets: str) -> MemberSession:
    """Return member `a` alone in the first generation."""
    member = world.client("a", desired=1, **secrets)  # type: ignore[arg-type]
    await asyncio.to_thread(member.join)
    await asyncio.to_thread(propose, member)
    await entered(member, 0)
    return member


Call = Callable[[MembershipStub], Awaitable[object]]


async def refusal(world: Served, call: Call) -> ShoalError | None:
    """Return the error with which a stranger's call is refused; None if it is not."""
    async with grpc.aio.insecure_channel(world.address) as channel:
        try:
            await call(MembershipStub(channel))
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, world.address)
    return None


def exited(**fields: str) -> Call:
    request = pb.ReportExitRequest(job="j", member_id="a", pid=1, host="h", exit_code=-9, **fields)
    return lambda stub: stub.ReportExit(request)


def halted(**fields: str) -> Call:
    request = pb.ReportHaltRequest(job="j", member_id="a", pid=1, host="h", halted=True, **fields)
    return lambda stub: stub.ReportHalt(request)


@pytest.mark.parametrize("report", [exited, halted])
@pytest.mark.parametrize(
    "secret", ["", digest_of(LAUNCH), new_secret()], ids=["none", "its digest", "another"]
)
async def test_a_report_without_the_launchers_secret_is_refused(
    report: Callable[..., Call], secret: str
) -> None:
    """The secret's digest, which is in etcd, is not proof either. The report changes nothing."""
    async with served(MemoryStore()) as world:
        member = await training(world, launch_secret=LAUNCH)
        refused = await refusal(world, report(launch_secret=secret))
        assert isinstance(refused, AccessDenied)
        assert LAUNCH not in str(refused)
        assert not member.is_broken(1) and member.failure is None
        assert list(world.coordinator.registry.find("j").job.members) == ["a"]


class GatedStore(HookedStore):
    """A store whose writes wait while `opened` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.opened.set()

    async def before(self, transaction: Transaction) -> None:
        await self.opened.wait()


async def test_reports_of_halts_are_answered_while_etcd_does_not_answer() -> None:
    """A launcher reports one event at a time: the report that the process goes on would come too
    late."""
    store = GatedStore()
    async with served(store) as world:
        await training(world, launch_secret=LAUNCH)
        job = world.coordinator.registry.find("j").job
        pid, host = job.members["a"].info.pid, job.members["a"].info.host
        store.opened.clear()
        writing = asyncio.create_task(world.coordinator.registry.find("j").stop("a test"))
        await asyncio.sleep(0)
        assert world.coordinator.registry.find("j").is_writing
        for is_halted in (True, False):
            report = pb.ReportHaltRequest(
                job="j",
                member_id="a",
                pid=pid,
                host=host,
                halted=is_halted,
                launch_secret=LAUNCH,
            )
            async with asyncio.timeout(WITHIN_S):
                assert await refusal(world, lambda stub, it=report: stub.ReportHalt(it)) is None
            assert (job.members["a"].halted_s is not None) is is_halted
        store.opened.set()
        await writing


async def test_a_report_with_the_launchers_secret_removes_the_member() -> None:
    async with served(MemoryStore()) as world:
        await training(world, launch_secret=LAUNCH)
        assert await refusal(world, exited(launch_secret=LAUNCH)) is None
        assert "a" not in world.coordinator.registry.find("j").job.members


async def test_a_new_leader_requires_the_launchers_secret_too() -> None:
    """The new leader reads the secret's digest from etcd, which does not have the secret."""
    store = MemoryStore()
    async with served(store) as world:
        member = await training(world, launch_secret=LAUNCH)
        kept = await store.get(keys.member("j", "a"))
        assert kept is not None and LAUNCH.encode() not in kept.value
        await world.coordinator.step_down()
        await world.server.stop(None)
        async with served(store, address=world.address) as later:
            assert isinstance(await refusal(later, exited()), AccessDenied)
            assert "a" in later.coordinator.registry.find("j").job.members
        await asyncio.to_thread(member.close)


def attends(member_id: str, secret: str) -> Call:
    async def call(stub: MembershipStub) -> object:
        request = pb.AttendRequest(
            protocol=OWN_PROTOCOLS.newest,
            oldest_protocol=OWN_PROTOCOLS.oldest,
            token=Token(
                job="j", member_id=member_id, incarnation=new_incarnation(), job_secret=secret
            ),
            spec=pb.JobSpec(job="j", min_members=1, max_members=8, desired_members=1),
            info=pb.MemberInfo(host="elsewhere", pid=2, address="127.0.0.1"),
        )
        stream = stub.Attend(request)
        first = await stream.read()
        stream.cancel()
        return first

    return call


def acts(secret: str) -> dict[str, Call]:
    """Return all calls that change a member or a job by its name."""
    return {
        "joins": attends("stranger", secret),
        "takes a member's place": attends("a", secret),
        "drains": lambda stub: stub.Drain(
            pb.DrainRequest(job="j", member_id="a", job_secret=secret)
        ),
        "stops": lambda stub: stub.StopJob(pb.StopJobRequest(job="j", job_secret=secret)),
        "resets": lambda stub: stub.ResetJob(pb.ResetJobRequest(job="j", job_secret=secret)),
        "retries": lambda stub: stub.RetryJob(pb.RetryJobRequest(job="j", job_secret=secret)),
        "reports an exit": exited(),
        "reports a halt": halted(),
    }


async def held(store: MemoryStore) -> dict[str, bytes]:
    """Return the whole content of etcd."""
    return {item.key: item.value for item in (await store.range("")).items}


@pytest.mark.parametrize(
    "secret", ["", digest_of(JOB), new_secret()], ids=["none", "its digest", "another"]
)
async def test_calls_without_a_jobs_secret_change_nothing_in_it(secret: str) -> None:
    """The names in a token are not proof, and the secret's digest, which is in etcd, is not
    either."""
    store = MemoryStore()
    async with served(store) as world:
        member = await training(world, job_secret=JOB)
        before = await held(store)
        for what, call in acts(secret).items():
            refused = await refusal(world, call)
            assert isinstance(refused, AccessDenied), (what, refused)
            assert JOB not in str(refused)
        token = member.token
        token.job_secret = secret
        beat = pb.HeartbeatRequest(beats=[pb.Beat(token=token)])
        async with grpc.aio.insecure_channel(world.address) as channel:
            reply = await MembershipStub(channel).Heartbeat(beat)
        assert reply.replies[0].error.kind == "AccessDenied"
        assert await held(store) == before
        assert JOB.encode() not in b"".join(before.values())
        assert not member.is_broken(1) and member.failure is None


async def test_a_public_id_is_no_proof_that_a_member_drains_itself() -> None:
    """Everybody can read the public id. The job's secret is not needed with the member's
    incarnation, and with nothing else."""
    async with served(MemoryStore()) as world:
        member = await training(world, job_secret=JOB)
        own = member.token.incarnation

        def drained(**process: str) -> Call:
            request = pb.DrainRequest(job="j", member_id="a", **process)  # type: ignore[arg-type]
            return lambda stub: stub.Drain(request)

        for incarnation, refused in (("", AccessDenied), ("a guess", UnknownMember)):
            call = drained(public_id=public_id(own), incarnation=incarnation)
            assert isinstance(await refusal(world, call), refused)
        assert world.coordinator.registry.find("j").job.members["a"].drain.since_s is None
        assert await refusal(world, drained(incarnation=own)) is None


async def test_a_jobs_secret_outlives_its_members_and_its_leader() -> None:
    store = MemoryStore()
    async with served(store) as world:
        member = await training(world, job_secret=JOB)
        await asyncio.to_thread(member.leave, completed=False, reason="done for today")
        assert isinstance(await refusal(world, attends("b", "")), AccessDenied)
    async with served(store) as later:
        # A new leader answers Unavailable while it still reads the job.
        while isinstance(found := await refusal(later, attends("b", "")), Unavailable):
            pass
        assert isinstance(found, AccessDenied)
        assert await refusal(later, attends("b", JOB)) is None


async def test_a_quarantined_job_is_reset_only_with_its_secret() -> None:
    """The secret counts even if another field of the job's record cannot be read."""
    store = MemoryStore()
    async with served(store) as world:
        member = await training(world, job_secret=JOB)
        await asyncio.to_thread(member.leave, completed=False, reason="done for today")
    item = await store.get(keys.job_state("j"))
    assert item is not None
    await store.put(item.key, item.value.replace(b'"finished": false', b'"finished": 0'))
    async with served(store) as later:
        assert list(later.coordinator.registry.quarantined) == ["j"]
        assert isinstance(await refusal(later, acts("")["resets"]), AccessDenied)
        assert await store.get(item.key) is not None
        assert await refusal(later, acts(JOB)["resets"]) is None
        assert await store.get(item.key) is None


async def test_calls_with_a_jobs_secret_join_and_stop_it() -> None:
    async with served(MemoryStore()) as world:
        await training(world, job_secret=JOB)
        assert await refusal(world, attends("b", JOB)) is None
        assert await refusal(world, acts(JOB)["stops"]) is None


async def test_a_job_begun_without_a_secret_refuses_a_member_with_one() -> None:
    """Members with and without the secret would train together, and it would protect nothing."""
    async with served(MemoryStore()) as world:
        await training(world)
        refused = await refusal(world, attends("b", JOB))
        assert isinstance(refused, AccessDenied)
        assert "begun without a secret" in refused.what


@pytest.mark.long
async def test_http_without_tokens_cannot_stop_a_job_with_a_secret() -> None:
    """A server without tokens admits every caller: a call over HTTP then proves nothing."""
    async with served(MemoryStore()) as world:
        member = await training(world, job_secret=JOB)
        app = build_app(
            world.coordinator.view,
            world.coordinator.board,
            operations=JobOperations(world.coordinator.registry),
        )
        async with (
            StatusServer(app, "127.0.0.1", 0) as server,
            httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
        ):
            answer = await http.post("/api/v1/jobs/j/stop", json={})
        assert answer.status_code == 403, answer.text
        assert "has a secret" in answer.text
        assert member.failure is None
