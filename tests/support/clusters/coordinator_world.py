"""A coordinator served over real gRPC, and real clients on separate threads."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from shoal_client.liveness.beat_board import BeatSlot
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.incarnation import new_incarnation
from shoal_proto.secrets import digest_of
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.assembly import Coordinator
from shoal_server.coordinator.parameters import ParametersPlugIn
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.coordinator.plug_in.options import ParameterOptions
from shoal_server.core.limits import Limits
from shoal_server.etcd.api import Compare, Keyspace, KeyValueStore
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.admission.config import JobLimits
from shoal_server.serving.rpc import bind, new_server

FIELDS = {"strategy": "ddp", "schema": "s1"}


def leader_store(store: Keyspace, *leadership: Compare) -> LeaderStore:
    """Return the store of a coordinator that leads as long as these comparisons hold."""
    return LeaderStore(store, lambda: leadership, lambda reason: None)


def jobs_in(store: Keyspace, *leadership: Compare) -> DurableJobs:
    """Return the durable jobs of such a coordinator."""
    return DurableJobs(leader_store(store, *leadership))


@dataclass(kw_only=True)
class Served:
    store: LeaderStore
    """The coordinator's store: it writes only while the coordinator leads."""
    coordinator: Coordinator
    server: grpc.aio.Server
    address: str
    clients: list[MemberSession] = field(default_factory=list)

    @property
    def parameters(self) -> ParametersPlugIn:
        assert isinstance(self.coordinator.plug_in, ParametersPlugIn)
        return self.coordinator.plug_in

    def member(
        self,
        name: str,
        *,
        job: str = "j",
        desired: int = 2,
        beat_slot: BeatSlot | None = None,
        shared_directory: Path | None = None,
        launch_secret: str = "",
        job_secret: str = "",
        **bounds: int,
    ) -> Member:
        """Describe a worker's process that joins the job."""
        spec = pb.JobSpec(
            job=job,
            min_members=bounds.get("low", 1),
            max_members=bounds.get("high", 8),
            desired_members=desired,
        )
        return Member(
            coordinators=[self.address],
            spec=spec,
            member_id=name,
            incarnation=new_incarnation(),
            info=pb.MemberInfo(
                host="h", pid=1, address="127.0.0.1", launch_digest=digest_of(launch_secret)
            ),
            job_secret=job_secret,
            beat_slot=beat_slot,
            shared_directory=shared_directory,
        )

    def client(self, name: str, **options: Any) -> MemberSession:
        """Make the session of such a process, which has not joined yet; closed at the end."""
        return self.session(self.member(name, **options))

    def session(self, member: Member, **options: Any) -> MemberSession:
        """Make a session that is closed at the end."""
        session = MemberSession(member, **options)
        self.clients.append(session)
        return session

    async def joined(
        self, name: str, *, desired: int = 2, shared_directory: Path | None = None, **bounds: int
    ) -> MemberSession:
        """Make a member that has joined and proposed."""
        client = self.client(name, desired=desired, shared_directory=shared_directory, **bounds)
        await asyncio.to_thread(client.join)
        await asyncio.to_thread(propose, client)
        return client

    async def training(self, *names: str) -> list[MemberSession]:
        """Make members that train together in the first generation."""
        members = [await self.joined(name, desired=len(names)) for name in names]
        await asyncio.gather(*(entered(member, 0) for member in members))
        return members


def propose(client: MemberSession, step: int = 0, fields: dict[str, str] | None = None) -> None:
    client.propose(fields or FIELDS, synchronous=True, step=step, has_state=step > 0)


async def entered(client: MemberSession, above: int) -> pb.GenerationRecord:
    """Wait for the next generation, report readiness, and return its record."""
    record = await asyncio.to_thread(client.await_generation, above, 10.0)
    await asyncio.to_thread(client.ready, record)
    return record


@asynccontextmanager
async def served(
    store: KeyValueStore,
    limits: Limits | None = None,
    conditions: Sequence[Compare] = (),
    *,
    address: str = "127.0.0.1:0",
    bounds: JobLimits | None = None,
    parameters: bool = True,
) -> AsyncIterator[Served]:
    """Run a coordinator that leads, on a free port unless an address is given. Without
    `parameters` it has no plug-in."""
    server = new_server()
    address = f"127.0.0.1:{bind(server, address)}"
    options = ParameterOptions() if parameters else None
    made = Coordinator(store, limits or Limits(), parameters=options, job_limits=bounds)
    async with made.running() as coordinator:
        coordinator.add_services(server)
        await coordinator.lead(conditions)
        await server.start()
        leading = leader_store(store, *conditions)
        world = Served(store=leading, coordinator=coordinator, server=server, address=address)
        try:
            yield world
        finally:
            for client in world.clients:
                await asyncio.to_thread(client.close)
            await coordinator.step_down()
            await server.stop(None)
