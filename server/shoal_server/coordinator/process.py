"""A coordinator process: from start through its terms as leader to SIGTERM."""

import asyncio
import gc
import socket
from contextlib import AsyncExitStack, suppress

import structlog
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from shoal_proto import descriptor_limit
from shoal_proto.addresses import join_address, split_address
from shoal_proto.errors import ShoalError
from shoal_proto.tls import identity
from shoal_server.coordinator.assembly import Coordinator
from shoal_server.coordinator.config import CoordinatorConfig
from shoal_server.coordinator.departure import wait_for_drains
from shoal_server.coordinator.jobs.operations import JobOperations
from shoal_server.coordinator.leadership.health import HealthService
from shoal_server.coordinator.leadership.leader_failover import end_term_when_gone
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.election import Election, Leadership
from shoal_server.etcd.leader_key import Leader, LeaderCandidate
from shoal_server.etcd.remote.client import opened
from shoal_server.serving.admission.calls import CallCounts
from shoal_server.serving.listening import (
    StopRequest,
    advertised_address,
    is_loopback,
    remove_ready_file,
    warn_of_exposure,
    write_ready_file,
)
from shoal_server.serving.rpc import bind, call_durations, new_server
from shoal_server.serving.tasks import wait_first
from shoal_server.status.access.guard import Guard
from shoal_server.status.access.tokens import Tokens
from shoal_server.status.app import build_app
from shoal_server.status.http.bounds import HttpBounds
from shoal_server.status.http.hosts import AllowedHosts
from shoal_server.status.metrics import ProcessMeasures
from shoal_server.status.serve import StatusServer, scheme_for

log = structlog.get_logger(__name__)

STOP_WITHIN_S = 2.0
LEAD_AGAIN_S = 1.0
GC_THRESHOLDS = (10_000, 10, 10)


async def serve(config: CoordinatorConfig) -> None:
    """Serve until SIGTERM or SIGINT, and then while members drain, for `drain_s` at most; a second
    signal ends the wait.

    While etcd does not answer, the coordinator serves without leading. Raises AddressInUse,
    InvalidSpec for the file of tokens, and AccessDenied from etcd.
    """
    stop = StopRequest()
    remove_ready_file(config.ready_file)
    descriptor_limit.raise_limit()
    async with AsyncExitStack() as stack:
        calls, durations = CallCounts(config.admission.calls), call_durations()
        server = new_server(durations, calls, config.admission.calls)
        address = advertised_address(config.advertise, config.listen, bind(server, config.listen))
        store = await stack.enter_async_context(opened(config.etcd))
        coordinator = Coordinator(
            store,
            config.limits,
            parameters=config.parameter_options,
            retention=config.retention,
            job_limits=config.admission.jobs,
        )
        await stack.enter_async_context(coordinator.running())
        measures = ProcessMeasures(
            calls=durations,
            num_leader_changes=lambda: coordinator.registry.known_leader.num_changes,
            rendezvous=lambda: coordinator.rendezvous.held,
        )
        app = build_app(
            coordinator.view,
            coordinator.board,
            measures,
            bounds=HttpBounds(config.admission.http),
            calls=calls,
            hosts=AllowedHosts((*config.http_hosts, split_address(address)[0])),
            guard=Guard(
                None if config.http_tokens is None else Tokens(config.http_tokens),
                own_user=config.http_clients == "user",
            ),
            operations=_operations(config, coordinator),
        )
        host, port = split_address(config.http)
        status = await stack.enter_async_context(
            StatusServer(
                app,
                host,
                port,
                clients=config.http_clients,
                certified_host=_host_for_members(config),
            )
        )
        page = coordinator.view.http_url = _http_url(config, address, status.port)
        coordinator.view.report_url = (
            f"https://{join_address(split_address(address)[0], status.certified_port)}"
            if status.certified_port
            else page
        )
        coordinator.add_services(server)
        health = HealthService()
        add_HealthServicer_to_server(health, server)
        # Garbage collection stops the event loop. Frozen objects are never scanned again; higher
        # thresholds make scans of thousands of members rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        await server.start()
        stack.push_async_callback(server.stop, STOP_WITHIN_S)
        stack.callback(health.end)
        host, url = socket.gethostname(), coordinator.view.http_url
        candidate = LeaderCandidate(address=address, http_url=url, host=host)
        leader_loop = LeaderLoop(coordinator, health, store, candidate, config.leader_lease_s)
        campaign = asyncio.create_task(leader_loop.run_for_ever(), name="campaign")
        stopping = asyncio.create_task(stop.requested.wait(), name="stop")
        stack.push_async_callback(_cancel, campaign, stopping)
        await wait_first(leader_loop.has_begun.wait(), campaign, stopping)
        if leader_loop.has_begun.is_set():
            write_ready_file(config.ready_file, {"grpc": address, "http": url})
            warn_of_exposure({"grpc": config.listen, "http": config.http}, config.etcd.endpoints)
            log.info("coordinator_serves", grpc=address, http=url)
        await wait_first(campaign, stopping)
        if stopping.done():
            leaving = wait_for_drains(coordinator.registry, config.drain_s)
            await wait_first(campaign, stop.repeated.wait(), leaving)
    log.info("coordinator_stopped", grpc=address)


def _operations(config: CoordinatorConfig, coordinator: Coordinator) -> JobOperations | None:
    """Operations for the HTTP API; None if callers have only certificates, since HTTP does not read
    the roles in certificates."""
    known = config.http_tokens is not None or config.http_clients == "user"
    if not known and identity.own() is not None:
        return None
    return JobOperations(coordinator.registry, coordinator.plug_in.take_snapshot)


def _http_url(config: CoordinatorConfig, address: str, port: int) -> str:
    """Return the status page's URL, at the host announced for gRPC unless only the page is on
    loopback."""
    host, grpc_host = split_address(config.http)[0], split_address(address)[0]
    if not is_loopback(host) or is_loopback(split_address(config.listen)[0]):
        host = grpc_host
    return f"{scheme_for(config.http_clients)}://{join_address(host, port)}"


def _host_for_members(config: CoordinatorConfig) -> str | None:
    """Host at which members on other machines report their health; None if they use the page's
    address."""
    host = split_address(config.listen)[0]
    # The page is on loopback then, and knows the users of this machine only.
    if config.http_clients != "user" or is_loopback(host) or identity.own() is None:
        return None
    return host


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class LeaderLoop:
    """Campaigns, leads until deposed, and campaigns again. Only etcd decides who leads."""

    def __init__(
        self,
        coordinator: Coordinator,
        health: HealthService,
        store: KeyValueStore,
        candidate: LeaderCandidate,
        leader_lease_s: float,
    ) -> None:
        """The process must already listen at the candidate's address."""
        self._coordinator = coordinator
        self._health = health
        self._store = store
        self._address = candidate.address
        self._election = Election(store, candidate, ttl_s=leader_lease_s)
        self._election.on_trouble = self._note_trouble
        self._election.on_leader = self._note
        coordinator.view.address = candidate.address
        self.has_begun = asyncio.Event()
        """Set once this coordinator leads, knows the leader, or knows that etcd does not answer."""

    async def run_for_ever(self) -> None:
        await self._election.end_predecessor()
        following = asyncio.create_task(self._follow(), name="follow-leader")
        try:
            while True:
                if not await self._lead(await self._election.campaign()):
                    # The next term may fail the same way: let another coordinator try.
                    await asyncio.sleep(LEAD_AGAIN_S)
        finally:
            await _cancel(following)

    async def _lead(self, leadership: Leadership) -> bool:
        """Lead until the term is over. True if the term began."""
        coordinator = self._coordinator
        try:
            await coordinator.lead((leadership.condition,))
            self.has_begun.set()
            self._health.set_leads(True)
            await wait_first(coordinator.term.deposed.wait(), leadership.lost.wait())
            reason = coordinator.term.why_deposed or leadership.reason
            log.warning("leader_deposed", reason=reason)
            coordinator.registry.known_leader.why_nobody = (
                f"no coordinator is known to lead: this coordinator's term has ended ({reason})"
            )
        except ShoalError as error:
            log.error("leadership_start_failed", reason=str(error))
            return False
        finally:
            self._health.set_leads(False)
            await coordinator.step_down()
            await leadership.resign()
        return True

    def _note_trouble(self, reason: str) -> None:
        known = self._coordinator.registry.known_leader
        known.address = ""
        known.why_nobody = f"no coordinator is known to lead: etcd does not answer ({reason})"
        self.has_begun.set()

    async def _follow(self) -> None:
        watching: asyncio.Task[None] | None = None
        try:
            async for leader in self._election.leaders():
                if watching is not None:
                    await _cancel(watching)
                    watching = None
                self._note(leader)
                if leader is not None and leader.address not in ("", self._address):
                    watching = asyncio.create_task(end_term_when_gone(self._store, leader))
        finally:
            if watching is not None:
                await _cancel(watching)

    def _note(self, leader: Leader | None) -> None:
        known = self._coordinator.registry.known_leader
        known.address = leader.address if leader and leader.address != self._address else ""
        known.note(leader.address if leader else "")
        if leader is None:
            known.why_nobody = "no coordinator leads: the next leader is being elected"
        elif not leader.address:
            known.why_nobody = (
                "no coordinator is known to lead:"
                f" the record at {keys.LEADER} in etcd cannot be read"
            )
        elif not known.address:
            known.why_nobody = "this coordinator was elected, and is reading the jobs from etcd"
        if leader is not None:
            self.has_begun.set()
