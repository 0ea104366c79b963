"""Client of an etcd cluster: see docs/decisions/0001-etcd-client.md."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType

import grpc
import grpc.aio

from shoal_proto.errors import LeaseExpired
from shoal_proto.etcd import etcd_pb2 as pb
from shoal_server.etcd.api import (
    NO_LEASE,
    Compare,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseId,
    Operation,
    RangeResult,
    Renewal,
    Revision,
    TransactionResult,
    WatchBatch,
)
from shoal_server.etcd.prefixed import PrefixedStore
from shoal_server.etcd.remote import wire
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.remote.connection import Attempt, Connections
from shoal_server.etcd.remote.renewal import LeaseThread
from shoal_server.etcd.remote.watch import read_snapshot, watch

KEYS_A_PAGE = 5000


@asynccontextmanager
async def opened(config: EtcdConfig) -> AsyncIterator[KeyValueStore]:
    async with EtcdClient(config) as client:
        yield PrefixedStore(client, config.prefix) if config.prefix else client


class EtcdClient:
    """`api.KeyValueStore` on etcd 3.4 or later, for one event loop. Connects at the first call."""

    def __init__(self, config: EtcdConfig) -> None:
        self._connections = Connections(config)

    async def __aenter__(self) -> "EtcdClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def get(self, key: str) -> KeyValue | None:
        request = wire.range_request(key, prefix=False)
        reply = await self._connections.call(
            lambda to: to.connection.kv.Range(request, timeout=to.timeout_s, metadata=to.metadata)
        )
        return wire.key_value(reply.kvs[0]) if reply.kvs else None

    async def range(self, prefix: str) -> RangeResult:
        return await read_snapshot(self._connections, prefix)

    async def keys(self, prefix: str) -> tuple[str, ...]:
        found: list[str] = []
        after = b""
        while True:
            request = wire.keys_request(prefix, after=after, limit=KEYS_A_PAGE)
            page = await self._connections.call(partial(_range, request))
            found += [wire.key_text(item.key) for item in page.kvs]
            if not page.more:
                return tuple(found)
            after = page.kvs[-1].key

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        start, _ = wire.key_range(key, prefix=False)
        request = pb.PutRequest(key=start, value=value, lease=lease)
        reply = await self._connections.call(
            lambda to: to.connection.kv.Put(request, timeout=to.timeout_s, metadata=to.metadata)
        )
        return Revision(reply.header.revision)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        request = wire.delete_request(key, prefix=prefix)
        reply = await self._connections.call(
            lambda to: to.connection.kv.DeleteRange(
                request, timeout=to.timeout_s, metadata=to.metadata
            )
        )
        return reply.deleted

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        request = wire.transaction_request(compares, then, otherwise)
        reads_only = all(isinstance(operation, Get) for operation in (*then, *otherwise))
        call = self._connections.call if reads_only else self._connections.call_once
        reply = await call(
            lambda to: to.connection.kv.Txn(request, timeout=to.timeout_s, metadata=to.metadata)
        )
        return wire.transaction_result(reply)

    def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        return watch(self._connections, prefix, start)

    async def grant(self, ttl_s: float) -> LeaseId:
        # A repeated grant leaves a lease that nobody renews: harmless.
        request = pb.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        reply = await self._connections.call(
            lambda to: to.connection.lease.LeaseGrant(
                request, timeout=to.timeout_s, metadata=to.metadata
            )
        )
        return LeaseId(reply.ID)

    async def keep_alive(self, lease: LeaseId) -> float:
        async def renew(to: Attempt) -> float:
            call: grpc.aio.StreamStreamCall[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse] = (
                to.connection.lease.LeaseKeepAlive(
                    iter((pb.LeaseKeepAliveRequest(ID=lease),)),
                    timeout=to.timeout_s,
                    metadata=to.metadata,
                )
            )
            async for response in call:
                return float(max(0, response.TTL))
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, details="the renewal ended without an answer"
            )

        return await self._connections.call(renew)

    def renew_in_background(self, lease: LeaseId, ttl_s: float) -> Renewal:
        return LeaseThread(self._connections, lease, ttl_s)

    async def revoke(self, lease: LeaseId) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        try:
            await self._connections.call(
                lambda to: to.connection.lease.LeaseRevoke(
                    request, timeout=to.timeout_s, metadata=to.metadata
                )
            )
        except LeaseExpired:
            return

    async def close(self) -> None:
        """Close every connection; calls and watches then raise RefusedError."""
        await self._connections.close()


async def _range(request: pb.RangeRequest, to: Attempt) -> pb.RangeResponse:
    return await to.connection.kv.Range(request, timeout=to.timeout_s, metadata=to.metadata)
