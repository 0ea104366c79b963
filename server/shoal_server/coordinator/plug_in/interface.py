"""Interface of a plug-in, with which a coordinator serves more than the membership of jobs.

There is one plug-in, `parameters`: shards, snapshots, samples and clocks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import grpc.aio

from shoal_proto.errors import NoServers
from shoal_proto.v1 import clocks_pb2_grpc, samples_pb2_grpc, shards_pb2_grpc, snapshots_pb2_grpc
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_proto.v1.snapshots_pb2 import PublishCutRequest, ShardStamp
from shoal_proto.v1.weights_pb2 import CutSegment
from shoal_server.coordinator.plug_in.options import ParameterOptions
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.core.processes import MemberProcess
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.status.board import StatusBoard
from shoal_server.status.views import SamplesView, ShardsView

PARAMETERS = ("shoal_server.coordinator.parameters", "ParametersPlugIn")
"""Module and class of the plug-in, for `load_plug_in`. No module of the coordinator imports them
otherwise."""

CheckRecord = Callable[[str, KeyValue, Sequence[KeyValue]], None]

_SERVICES = (
    (clocks_pb2_grpc, "Clocks"),
    (samples_pb2_grpc, "Samples"),
    (shards_pb2_grpc, "Shards"),
    (snapshots_pb2_grpc, "Snapshots"),
)


@dataclass(frozen=True, kw_only=True)
class PublishedCut:
    """A cut of a job's shards that servers keep as segments, ordered by shard."""

    segments: Sequence[CutSegment]
    layout: ShardMap
    stamps: Sequence[ShardStamp]
    torn: Sequence[str]
    """Pushes that are in only some shards of the cut."""
    pause_s: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """The coordinator, as a plug-in sees it. Calls accept the name of an unknown job, except for
    `authorize` and `declare_lost`."""

    store: LeaderStore
    board: StatusBoard
    server_calls: ServerCalls
    clock: Callable[[], float]
    """Returns Unix seconds that never jump."""
    authorize: Callable[[Token], Awaitable[None]]
    """Raises what `Registry.authorize` raises."""
    require_leading: Callable[[], None]
    """Raises NotLeader unless the coordinator leads."""
    declare_lost: Callable[[str, MemberProcess, str], Awaitable[None]]
    """Takes (job, member, reason), as `Registry.declare_lost`."""
    quarantine: Callable[[str, Exception], object]
    """Takes a job with which the plug-in cannot continue, and the error."""
    num_members: Callable[[str], int]
    """Returns the number of a job's members; 1 for an unknown job."""
    training: Callable[[str], Mapping[str, int]]
    """Returns {"generation": highest in force, "step": highest in a heartbeat} of a job; empty for
    an unknown job."""
    stuck_after_s: float
    """Longest time for which a member may hold up the others."""
    call_wait_s: float


class PlugIn:
    """Services of a coordinator beside membership, on its event loop. The base class refuses their
    calls."""

    take_snapshot: Callable[[str], Awaitable[object]] | None = None
    """Takes a snapshot of a job; None if there are no snapshots."""

    # --- services and background work ---

    def add_services(self, server: grpc.aio.Server) -> None:
        """Add the plug-in's services to a server that has not started."""
        for module, name in _SERVICES:
            refusing = _refusing(getattr(module, f"{name}Servicer"))
            getattr(module, f"add_{name}Servicer_to_server")(refusing, server)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Context of the work that does not depend on leading."""
        return _nothing()

    async def begin(self) -> None:
        """Prepare a term, before any job is read. Raises what the store raises."""

    async def open_job(self, job: str) -> None:
        """Read the plug-in's records of a job. Raises JobQuarantined, and what the store raises."""

    def inherit(self, job: str, trainers: Sequence[MemberProcess]) -> None:
        """Take over a job whose members trained under another leader."""

    def leading(self) -> AbstractAsyncContextManager[None]:
        """Context of a leader's work, entered once the coordinator serves jobs."""
        return _nothing()

    async def hand_over(self) -> None:
        """Store the state of all jobs for the next leader, and drop it from memory. Called once no
        job is served."""

    def member_lost(self, job: str, member_id: str, incarnation: str) -> None:
        """Note that a member was lost or left."""

    async def publish_cut(
        self, job: str, request_to: Callable[[str], PublishCutRequest]
    ) -> PublishedCut:
        """Have servers keep a cut of the job's shards as segments. `request_to` returns the request
        for a server id. Without an override, raises NoServers."""
        raise _not_served()

    # --- retention, reset and repair ---

    def closed_ledger(self, job: str) -> AbstractAsyncContextManager[None]:
        """Context in which no samples of the job are written."""
        return _nothing()

    def forget(self, job: str) -> None:
        """Forget a job whose keys are deleted."""

    def reopen(self, job: str) -> None:
        """Drop a job's state from memory, so that its replaced records are read again."""

    async def num_samples(self, job: str) -> int | None:
        """Number of completed samples; None if the job leases none. Raises JobQuarantined, and what
        the store raises."""
        return None

    def check_record(self, job: str, item: KeyValue, items: Sequence[KeyValue]) -> None:
        """Raise UnreadableRecord or ShoalError if `item`, one of a job's `items`, is an unreadable
        record of the plug-in."""

    # --- view ---

    def clocks(self, job: str) -> Mapping[str, int]:
        """Round of each member that has a clock."""
        return {}

    def waiting(self, job: str) -> Mapping[str, tuple[str, float]]:
        """Members that wait for the plug-in: the reason, and the start of the wait."""
        return {}

    def samples(self, job: str) -> SamplesView | None:
        """Samples of a job; None if it leases none, or its ledger is not open here."""
        return None

    async def shards(self, job: str) -> ShardsView | None:
        """Shards of a job; None without any. Raises Unavailable if etcd cannot be reached."""
        return None


def load_plug_in(host: Host, options: ParameterOptions | None) -> PlugIn:
    """Import and return the plug-in for parameters; without options, one that refuses calls."""
    if options is None:
        return PlugIn()
    module, kind = PARAMETERS
    plug_in: PlugIn = getattr(import_module(module), kind)(host, options)
    return plug_in


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def _not_served() -> NoServers:
    return NoServers(
        "this coordinator serves no jobs with parameters on servers",
        seen="a coordinator that was started with --no-parameters",
        expected="a coordinator without that option",
        fix="Restart it without that option; for a cluster of `shoal run`, use --ps 1 or more.",
    )


def _refusing(service: type[Any]) -> Any:
    async def refuse(self: object, request: object, context: object) -> None:
        raise _not_served()

    calls = {name: refuse for name in vars(service) if not name.startswith("_")}
    return type(service.__name__, (service,), calls)()
