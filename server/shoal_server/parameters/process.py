"""The parameter server as a process: store, fence, registration and gRPC, wired together."""

import asyncio
import ctypes
import gc
import re
import signal
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import structlog
import torch
from prometheus_client.metrics_core import Metric

from shoal_proto import descriptor_limit
from shoal_proto.addresses import split_address
from shoal_proto.errors import RetryError
from shoal_proto.incarnation import new_incarnation
from shoal_proto.tls.bulk_offers import BulkOffers
from shoal_proto.v1.parameters_pb2_grpc import add_ParametersServicer_to_server
from shoal_proto.v1.replication_pb2_grpc import add_ReplicationServicer_to_server
from shoal_proto.v1.snapshots_pb2_grpc import add_ShardSnapshotsServicer_to_server
from shoal_proto.v1.weights_pb2_grpc import add_WeightStoreServicer_to_server
from shoal_server.core.processes import Holder
from shoal_server.core.replication.replication_core import ReplicationCore
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import snapshot_roots
from shoal_server.etcd.remote.client import opened
from shoal_server.parameters.cluster import predecessor
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.cluster.registration import Registration, ServerIdentity
from shoal_server.parameters.config import ParameterServerConfig
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.journal_recovery import DiskRemovalLoop, JournalRecovery
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.service.bulk_connection import BulkServices
from shoal_server.parameters.service.bulk_listener import BulkListener
from shoal_server.parameters.service.parameters_servicer import ParametersServicer
from shoal_server.parameters.service.snapshots_servicer import SnapshotsServicer
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.workers import Workers
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers
from shoal_server.parameters.tables.restore import restore
from shoal_server.parameters.weights.differences import WeightDifferences
from shoal_server.parameters.weights.disk import WeightDisk
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.peers import WeightPeers
from shoal_server.parameters.weights.records import SeriesRecords
from shoal_server.parameters.weights.servicer import WeightsServicer
from shoal_server.parameters.weights.upkeep import WeightUpkeep
from shoal_server.serving import tasks
from shoal_server.serving.admission.calls import CallCounts
from shoal_server.serving.durations import Durations
from shoal_server.serving.listening import (
    advertised_address,
    remove_ready_file,
    warn_of_exposure,
    write_ready_file,
)
from shoal_server.serving.loop_lag import LoopLag
from shoal_server.serving.process_metrics import (
    MetricsEndpoint,
    build_info,
    histogram,
    loop_lag,
)
from shoal_server.serving.rpc import bind, call_durations, new_server

log = structlog.get_logger(__name__)

SNAPSHOT_THREADS = 2
WEIGHT_THREADS = 4
"""Threads for digests of segments, and for differences."""
MAX_TRANSFERS = 4096
"""Threads for transfers of segments between servers, started as needed: more than there are puts in
progress, since each waits for the next server, which may wait for this one."""
LEASES_TO_WAIT_FOR = 4
MAX_LOGGED = 20
# Values of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_HEAP_BYTES = 256 * 1024 * 1024
"""Free memory at the heap's end that is kept for the next push."""
_MAX_HEAP_CHUNK_BYTES = 32 * 1024 * 1024
"""Larger blocks go back to the kernel when freed. glibc allows no higher threshold."""


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    server_id: str
    address: str
    """The advertised address."""
    port: int
    fence: Fence
    replicas: ShardReplicas
    catalog: Catalog
    registration: Registration
    weights: WeightUpkeep


async def serve(config: ParameterServerConfig, stop: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set, or without it until SIGTERM or SIGINT.

    Raises AddressInUse for a taken port, server id or journal directory; InvalidSpec or
    JournalDamaged for an unusable journal; DiskFull, Unavailable or OSError if a disk fails at the
    start; Unavailable if etcd cannot be reached; and what ended a watch of etcd or the
    registration.
    """
    remove_ready_file(config.ready_file)
    # Shards are worked on in parallel; threads within a kernel would compete with that.
    torch.set_num_threads(1)
    descriptor_limit.raise_limit()
    _keep_freed_memory()
    # Gradients are tensors over the bytes in which they arrived; kernels do not write to them.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Later garbage collections skip the objects that exist by now: otherwise each would scan all of
    # torch, for 0.1 s. `collect` blocks the event loop, so it comes before any call.
    gc.collect()
    gc.freeze()
    async with opened(config.etcd) as store, running(config, store) as server:
        gc.freeze()
        write_ready_file(config.ready_file, {"grpc": server.address})
        await _until(stop, server)
        await hand_over(server, config.drain_s)


async def hand_over(server: RunningServer, drain_s: float) -> None:
    """Hand shards and published weights over to other servers for at most `drain_s`. Then log those
    whose only copies are still here."""
    me = server.replicas.me
    try:
        async with asyncio.timeout(drain_s):
            await server.registration.announce_leaving()
            await asyncio.gather(server.replicas.wait_empty(), server.weights.wait_copied(me))
    except (TimeoutError, RetryError) as error:
        log.warning("server_stopped_before_hand_over", server_id=me.server_id, reason=repr(error))
    full = server.replicas.full_peers
    for job, shard_ids in server.replicas.sole_copies.items():
        log.error(
            "server_stopped_with_sole_copies",
            job=job,
            shard_ids=shard_ids[:MAX_LOGGED],
            num_shards=len(shard_ids),
            reason="; ".join(f"{peer.server_id}: {why}" for peer, why in sorted(full.items()))
            or "no other server took them",
            fix="These shards are lost unless a snapshot is restored. Before a server is stopped,"
            " start another one with enough memory for its shards.",
        )
    for series, digests in server.weights.sole_copies.items():
        log.error(
            "server_stopped_with_sole_segments",
            series=series,
            digests=[digest.hex() for digest in digests[:MAX_LOGGED]],
            num_segments=len(digests),
            reason="no other server had copied them yet",
            fix="The versions with these segments are lost. Before a server is stopped, start"
            " another one with enough memory, and give this one more time with --drain-s.",
        )


@asynccontextmanager
async def running(
    config: ParameterServerConfig, store: KeyValueStore
) -> AsyncIterator[RunningServer]:
    async with AsyncExitStack() as stack:
        calls, durations = CallCounts(config.work.calls), call_durations()
        server = new_server(durations, calls, config.work.calls)
        port = bind(server, config.listen)
        address = advertised_address(config.advertise, config.listen, port)
        server_id = config.server_id or _id_of(address)
        pool = ThreadPoolExecutor(config.work.num_threads, thread_name_prefix="shoal-shards")
        stack.callback(pool.shutdown)
        me = Holder(server_id, new_incarnation())
        run = Workers(pool)
        catalog = Catalog(store, me, max_sessions=config.max_sessions)
        budget = Budget(config.work.max_unfinished_bytes)
        memory = Memory(config.memory_limit_bytes, catalog, budget)
        driver = CoreDriver(ReplicationCore(me, config.timeouts.limits))
        replicas = ShardReplicas(
            store, driver, catalog, memory=memory, run=run, timeouts=config.timeouts
        )
        offers = BulkOffers()
        replication = replicas.servicer(offers)
        await stack.enter_async_context(replicas)
        fence = await stack.enter_async_context(Fence(store, replicas.drop_job, replicas))
        barriers = SnapshotBarriers(catalog, fence, replicas.placement_id)
        maker = TableMaker(store, catalog, replicas, memory)
        servicer = ParametersServicer(
            catalog=catalog,
            maker=maker,
            replicas=replicas,
            fence=fence,
            barriers=barriers,
            run=run,
            budget=budget,
            memory=memory,
            offers=offers,
            loop_lag=await stack.enter_async_context(LoopLag()),
        )
        await stack.enter_async_context(_metrics_served(config, servicer, durations))
        add_ParametersServicer_to_server(servicer, server)
        add_ReplicationServicer_to_server(replication, server)
        # Slow storage must not delay work on shards.
        writers = ThreadPoolExecutor(SNAPSHOT_THREADS, thread_name_prefix="shoal-snapshots")
        stack.callback(writers.shutdown)
        weights = await stack.enter_async_context(
            _weights(
                server,
                store,
                replicas,
                memory=memory,
                offers=offers,
                directory=config.weights_directory,
            )
        )
        snapshots = SnapshotsServicer(
            catalog=catalog,
            replicas=replicas,
            barriers=barriers,
            maker=maker,
            memory=memory,
            pool=writers,
            weights=weights,
            read_roots=partial(snapshot_roots.read, store),
        )
        add_ShardSnapshotsServicer_to_server(snapshots, server)
        await server.start()
        if config.journal is not None:
            await stack.enter_async_context(_journal(config.journal, store, replicas, config))
        else:
            await predecessor.succeed(store, me)
            removal = DiskRemovalLoop(store, replicas, config.timeouts.limits)
            await removal.correct_assignments()
            await stack.enter_async_context(
                tasks.running(tasks.run_restarting(removal.correct_for_ever, "correcting-disks"))
            )
        stack.push_async_callback(server.stop, 1.0)
        listener = BulkListener(
            BulkServices(servicer, replication, weights),
            offers,
            memory,
            most=config.work.most_bulk_connections,
        )
        await stack.enter_async_context(listener.listening(_host(config.listen), config.bulk_port))
        # Entered last and left first: the server is in etcd only while it serves calls.
        identity = ServerIdentity(
            holder=me,
            address=address,
            started_unix_s=time.time(),
            torch_version=torch.__version__,
        )
        registration = await stack.enter_async_context(
            Registration(
                store,
                identity,
                config.lease_ttl_s,
                on_renewed=replicas.lease_renewed,
                on_end=replicas.lease_ended,
            )
        )
        warn_of_exposure({"grpc": config.listen}, config.etcd.endpoints)
        log.info(
            "parameter_server_started",
            server_id=server_id,
            address=address,
            memory_limit_bytes=config.memory_limit_bytes,
        )
        yield RunningServer(
            server_id=server_id,
            address=address,
            port=port,
            fence=fence,
            replicas=replicas,
            catalog=catalog,
            registration=registration,
            weights=weights.upkeep,
        )
    log.info("parameter_server_stopped", server_id=server_id)


@asynccontextmanager
async def _weights(
    server: grpc.aio.Server,
    store: KeyValueStore,
    replicas: ShardReplicas,
    *,
    memory: Memory,
    offers: BulkOffers,
    directory: Path | None,
) -> AsyncIterator[WeightsServicer]:
    """Hold and serve published weights, as the series' records demand: in memory, and in
    `directory` if given."""
    server_id = replicas.me.server_id
    disk = await asyncio.to_thread(WeightDisk, directory) if directory is not None else None
    with (
        ThreadPoolExecutor(WEIGHT_THREADS, thread_name_prefix="shoal-weights") as threads,
        ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="shoal-transfers") as transfers,
    ):
        peers = WeightPeers(transfers)
        holdings = WeightHoldings(memory, threads, peers)
        differences = WeightDifferences(memory, threads)
        upkeep = WeightUpkeep(server_id, holdings, replicas.directory, peers, disk)
        records = SeriesRecords(store, holdings, upkeep)
        servicer = WeightsServicer(
            server_id,
            records=records,
            holdings=holdings,
            differences=differences,
            upkeep=upkeep,
            peers=peers,
            offers=offers,
        )
        add_WeightStoreServicer_to_server(servicer, server)
        try:
            async with (
                records,
                tasks.running(
                    tasks.run_restarting(servicer.sweep_for_ever, "published-weights"),
                    tasks.run_restarting(upkeep.work_for_ever, "upkeep-of-weights"),
                ),
            ):
                yield servicer
        finally:
            peers.close()
            differences.close()
            holdings.close()


@asynccontextmanager
async def _metrics_served(
    config: ParameterServerConfig, servicer: ParametersServicer, calls: Durations
) -> AsyncIterator[None]:
    if not config.metrics:
        yield
        return
    collect = partial(_metrics, servicer, calls)
    async with MetricsEndpoint(*split_address(config.metrics), collect):
        yield


def _metrics(servicer: ParametersServicer, calls: Durations) -> Iterator[Metric]:
    """Metrics of this process. The coordinator has the metrics of its shards."""
    yield build_info("ps")
    yield loop_lag("process", servicer.loop_lag)
    yield histogram(
        "shoal_ps_call_duration_seconds",
        "Duration of gRPC calls with one answer, by method and outcome (OK, cancelled, or the"
        " error).",
        calls,
    )
    yield histogram(
        "shoal_ps_push_duration_seconds",
        "Duration of pushes to parameters, from their header to the last answer.",
        servicer.push_durations,
    )


@asynccontextmanager
async def _journal(
    journal_config: JournalConfig,
    store: KeyValueStore,
    replicas: ShardReplicas,
    config: ParameterServerConfig,
) -> AsyncIterator[None]:
    """Become primary of shards in the journal. During the block, journal every shard that this
    server leads."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="shoal-journal-images") as pool:
        journal = await loop.run_in_executor(pool, Journal, journal_config)
        released = await loop.run_in_executor(pool, journal.own, replicas.me)
        await predecessor.succeed(store, replicas.me, released=released)
        recovered = await loop.run_in_executor(pool, journal.recover, restore)
        with journal:
            async with replicas.shard_journal(journal, pool):
                recovery = JournalRecovery(store, replicas, config.timeouts.limits)
                await recovery.at_once(recovered, LEASES_TO_WAIT_FOR * config.lease_ttl_s)
                # Free the shards that this server does not lead.
                del recovered
                claiming = tasks.run_restarting(recovery.claim_later, "claiming-journal")
                async with tasks.running(claiming):
                    yield


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory. Gradients arrive in pieces of MiBs, and faulting returned pages
    in again costs more than filling them. Does nothing with another C library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.info("allocator_unchanged", reason="no mallopt in this C library")
        return
    for option, value in (
        (_M_MMAP_THRESHOLD, _MAX_HEAP_CHUNK_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES),
        (_M_TOP_PAD, _MAX_HEAP_CHUNK_BYTES),
    ):
        if mallopt(option, value) != 1:
            log.warning("allocator_option_refused", option=option, value=value)


async def _until(stop: asyncio.Event, server: RunningServer) -> None:
    waits = [
        asyncio.ensure_future(wait)
        for wait in (
            stop.wait(),
            server.fence.wait_failed(),
            server.replicas.wait_failed(),
            server.registration.wait_failed(),
        )
    ]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        await tasks.cancel(*waits)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _id_of(address: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", address).lstrip(".-")
