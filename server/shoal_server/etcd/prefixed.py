"""A store inside another: each key gets a prefix.

So several clusters can share an etcd. Ids of leases have no prefix: they are passed on unchanged.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from shoal_server.etcd.api import (
    NO_LEASE,
    Compare,
    KeyValue,
    KeyValueStore,
    LeaseId,
    Operation,
    Put,
    RangeResult,
    Renewal,
    Revision,
    TransactionResult,
    WatchBatch,
    WatchEvent,
)

Item = TypeVar("Item", KeyValue, WatchEvent)


class PrefixedStore:
    """`api.KeyValueStore` over the keys of another store under a prefix."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def _outer(self, key: str, *, prefix: bool = False) -> str:
        # An empty key stays empty, so that the store refuses it.
        return self._prefix + key if key or prefix else ""

    def _outer_of(self, each: Compare | Operation) -> str:
        return self._outer(each.key, prefix=not isinstance(each, Put) and each.prefix)

    def _inner(self, item: Item) -> Item:
        return replace(item, key=item.key.removeprefix(self._prefix))

    def _inner_all(self, items: Sequence[Item]) -> tuple[Item, ...]:
        return tuple(self._inner(item) for item in items)

    async def get(self, key: str) -> KeyValue | None:
        found = await self._store.get(self._outer(key))
        return None if found is None else self._inner(found)

    async def range(self, prefix: str) -> RangeResult:
        found = await self._store.range(self._prefix + prefix)
        return replace(found, items=self._inner_all(found.items))

    async def keys(self, prefix: str) -> tuple[str, ...]:
        found = await self._store.keys(self._prefix + prefix)
        return tuple(key.removeprefix(self._prefix) for key in found)

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        return await self._store.put(self._outer(key), value, lease)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        return await self._store.delete(self._outer(key, prefix=prefix), prefix=prefix)

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        result = await self._store.transact(
            [replace(each, key=self._outer_of(each)) for each in compares],
            [replace(each, key=self._outer_of(each)) for each in then],
            [replace(each, key=self._outer_of(each)) for each in otherwise],
        )
        return replace(result, reads=tuple(self._inner_all(read) for read in result.reads))

    async def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        async with aclosing(self._store.watch(self._prefix + prefix, start)) as batches:
            async for batch in batches:
                yield replace(batch, events=self._inner_all(batch.events))

    async def grant(self, ttl_s: float) -> LeaseId:
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> float:
        return await self._store.keep_alive(lease)

    def renew_in_background(self, lease: LeaseId, ttl_s: float) -> Renewal:
        return self._store.renew_in_background(lease, ttl_s)

    async def revoke(self, lease: LeaseId) -> None:
        await self._store.revoke(lease)

    async def close(self) -> None:
        await self._store.close()
