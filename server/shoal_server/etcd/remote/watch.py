"""A watch that survives restarts of etcd, dead endpoints and compacted history.

Each new stream asks for the next revision that the tracker has to deliver. An answer is delivered
once all its fragments have arrived: after a break, the new stream repeats the whole revision.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc
import grpc.aio
import structlog

from shoal_proto.back_off import BackOff
from shoal_proto.errors import CorruptError, ShoalError, Unavailable
from shoal_proto.etcd import etcd_pb2 as pb
from shoal_server.etcd.api import RangeResult, Revision, WatchBatch
from shoal_server.etcd.remote import wire
from shoal_server.etcd.remote.connection import Connections
from shoal_server.etcd.remote.failures import Remedy
from shoal_server.etcd.tracker import WatchTracker
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5

Stream = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]


class _Compacted(Exception):
    """The revision from which the watch must continue was compacted."""


async def read_snapshot(connections: Connections, prefix: str) -> RangeResult:
    """All keys under a prefix, read linearizably. Raises what `Connections.call` raises."""
    request = wire.range_request(prefix, prefix=True)
    reply = await connections.call(
        lambda to: to.connection.kv.Range(request, timeout=to.timeout_s, metadata=to.metadata)
    )
    return RangeResult(Revision(reply.header.revision), wire.key_values(reply.kvs))


async def watch(
    connections: Connections, prefix: str, start: Revision
) -> AsyncGenerator[WatchBatch, None]:
    tracker = WatchTracker(start)
    pauses = BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    interrupted = False
    while True:
        try:
            async with aclosing(_follow(connections, prefix, tracker)) as batches:
                async for batch in batches:
                    if interrupted:
                        log.info("watch_resumed", prefix=prefix, revision=batch.revision)
                    interrupted = False
                    pauses.reset()
                    yield batch
        except _Compacted:
            batch = tracker.reset(await _read_patiently(connections, prefix))
            log.warning("watch_reset", prefix=prefix, revision=batch.revision)
            yield batch
        except Unavailable as error:
            # Log once per outage.
            if not interrupted:
                log.warning(
                    "watch_interrupted", prefix=prefix, next=tracker.next, reason=str(error)
                )
            interrupted = True
            await asyncio.sleep(pauses.pause_s())


async def _read_patiently(connections: Connections, prefix: str) -> RangeResult:
    while True:
        try:
            return await read_snapshot(connections, prefix)
        except Unavailable as error:
            log.warning("watch_interrupted", prefix=prefix, reason=str(error))


async def _follow(
    connections: Connections, prefix: str, tracker: WatchTracker
) -> AsyncGenerator[WatchBatch, None]:
    """Yield the batches of one stream. Raises Unavailable, _Compacted, a refusal or CorruptError at
    its end."""
    connection, token = connections.current, connections.token
    try:
        with connections.cancel_as_failure(connection):
            metadata = await connections.metadata(connection)
        token = connections.token
        call: Stream = connection.watch.Watch(metadata=metadata)
    except grpc.RpcError as error:
        raise _lost(connections, connection.address, token, error) from error
    create = pb.WatchRequest(create_request=_create(prefix, tracker.next))
    try:
        silence_s = connections.config.silence_s
        with connections.cancel_as_failure(connection):
            async with aclosing(_responses(call, create, silence_s)) as responses:
                async for events in _whole(connections, prefix, tracker, responses):
                    batch = tracker.advance(wire.watch_event(each) for each in events)
                    if batch is not None:
                        yield batch
    except grpc.RpcError as error:
        raise _lost(connections, connection.address, token, error) from error
    except TimeoutError as error:
        connections.replace(connection)
        connections.switch_endpoint(connection.address)
        raise Unavailable(
            f"etcd at {connection.address} has fallen silent",
            seen=f"nothing received for {silence_s:g} s",
        ) from error
    finally:
        call.cancel()


async def _whole(
    connections: Connections,
    prefix: str,
    tracker: WatchTracker,
    responses: AsyncIterator[pb.WatchResponse],
) -> AsyncIterator[list[pb.Event]]:
    """Yield the events of each answer, assembled from fragments."""
    events: list[pb.Event] = []
    async for response in responses:
        if response.canceled:
            _raise_cancelled(response)
        if response.created:
            await _check_history(connections, prefix, tracker, response.header.revision)
        events.extend(response.events)
        # An answer without events is about progress, and may come between fragments.
        if response.events and not response.fragment:
            yield events
            events = []


async def _responses(
    call: Stream, create: pb.WatchRequest, silence_s: float
) -> AsyncGenerator[pb.WatchResponse, None]:
    """Yield a stream's responses, and request progress if none arrive.

    Raises TimeoutError after `silence_s` without a response, and grpc.RpcError when the call ends.
    """
    await _send(call, create, silence_s)
    clock = asyncio.get_running_loop().time
    received_s = clock()
    # Cancelling a read would cancel the whole call.
    reading = asyncio.ensure_future(call.read())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=silence_s / 3)
            if not done:
                if clock() - received_s >= silence_s:
                    raise TimeoutError
                # Some versions never answer a progress request that comes before the watch has
                # caught up with history (etcd-io/etcd#17507).
                await _send(call, _PROGRESS, silence_s)
                continue
            response = reading.result()
            if not isinstance(response, pb.WatchResponse):
                raise await _ending(call)
            received_s = clock()
            yield response
            # The consumer's time does not count as silence.
            received_s = clock()
            reading = asyncio.ensure_future(call.read())
    finally:
        call.cancel()
        await cancel(reading)


_PROGRESS = pb.WatchRequest(progress_request=pb.WatchProgressRequest())


async def _send(call: Stream, request: pb.WatchRequest, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await call.write(request)
    except asyncio.InvalidStateError:
        raise await _ending(call) from None


async def _ending(call: Stream) -> grpc.aio.AioRpcError:
    code, text = await call.code(), await call.details()
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.OK else code,
        details=text or "the stream ended",
    )


def _create(prefix: str, start: Revision) -> pb.WatchCreateRequest:
    key, end = wire.key_range(prefix, prefix=True)
    return pb.WatchCreateRequest(key=key, range_end=end, start_revision=start, fragment=True)


def _raise_cancelled(response: pb.WatchResponse) -> None:
    if response.compact_revision > 0:
        raise _Compacted
    code = grpc.StatusCode.UNAVAILABLE
    if "permission denied" in response.cancel_reason.lower():
        code = grpc.StatusCode.PERMISSION_DENIED
    raise grpc.aio.AioRpcError(code, details=response.cancel_reason or "the watch was cancelled")


async def _check_history(
    connections: Connections, prefix: str, tracker: WatchTracker, revision: int
) -> None:
    """Raise CorruptError if etcd's revision is below the last one delivered.

    One member may lag, so a linearizable read decides.
    """
    sent_revision = tracker.next - 1
    if revision >= sent_revision:
        return
    now = await read_snapshot(connections, prefix)
    if now.revision < sent_revision:
        raise CorruptError(
            "etcd has lost history",
            seen=f"revision {now.revision}",
            expected=f"at least {sent_revision}, which it has sent before",
            fix="Was its data directory replaced? Bring the former data back: jobs and shards are"
            " found through it, also the shards in journals. Then restart Shoal's servers.",
        )


def _lost(
    connections: Connections, address: str, token: str | None, error: grpc.RpcError
) -> ShoalError:
    failure = connections.failure_of(error, address)
    if failure.remedy is Remedy.NONE:
        return failure.error
    if failure.remedy is Remedy.LOGIN:
        if not connections.config.user:
            return failure.error
        connections.forget(token)
    else:
        connections.switch_endpoint(address)
    return Unavailable(f"the watch at {address} broke", seen=failure.error.seen)
