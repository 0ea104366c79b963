"""Mirror of the keys under a prefix in etcd.

`Keyspace.watch` survives outages and compacted history. Any other error ends the mirror, or makes
it list the keys again (`resync`). Calls raise what their store raises.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import structlog

from shoal_proto.back_off import BackOff
from shoal_proto.errors import ShoalError
from shoal_server.etcd.api import (
    EventKind,
    Keyspace,
    KeyValue,
    Revision,
    WatchBatch,
    WatchEvent,
)
from shoal_server.serving.tasks import cancel, wait_first

log = structlog.get_logger(__name__)

T = TypeVar("T")

RESYNC_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class MirroredKey:
    """An existing key, and the revision that wrote it."""

    key: str
    value: bytes
    mod_revision: Revision


async def list_and_watch(
    store: Keyspace, prefix: str, after: Revision | None = None
) -> AsyncGenerator[WatchBatch, None]:
    """Yield the current keys as a batch with `reset`, then every change.

    `after`: only changes after that revision.
    """
    if after is None:
        listing = WatchBatch.of_listing(await store.range(prefix))
        after = listing.revision
        yield listing
    async with aclosing(store.watch(prefix, Revision(after + 1))) as batches:
        async for batch in batches:
            yield batch


async def follow_key(
    store: Keyspace, key: str, after: Revision | None = None
) -> AsyncGenerator[MirroredKey | None, None]:
    """Yield a key (None: it does not exist), and again after changes.

    Of changes that arrive together, only the last is yielded. A reset of the watch yields the key
    even if it is unchanged. `after`: only changes after that revision.
    """
    async with aclosing(list_and_watch(store, key, after)) as batches:
        async for batch in batches:
            events = [event for event in batch.events if event.key == key]
            if events:
                yield _item(events[-1]) if events[-1].kind is EventKind.PUT else None
            elif batch.reset:
                yield None


class PrefixMirror(Generic[T]):
    """The records under a prefix as last seen [Kubernetes: informer].

    It follows etcd during its `async with` block, on one event loop. The newest revision of a key
    wins, from the watch or from `note`. Callbacks for a key are called in the order of its
    revisions.
    """

    def __init__(
        self,
        store: Keyspace,
        prefix: str,
        parse: Callable[[MirroredKey], T | None],
        *,
        on_put: Callable[[str, T, T | None], object] = lambda name, new, old: None,
        on_delete: Callable[[str, T], object] = lambda name, old: None,
        on_change: Callable[[], object] = lambda: None,
        resync: bool = False,
    ) -> None:
        """`parse` returns a record, or None to drop the known one. A ShoalError of `parse` is
        logged, and the known record kept.

        `on_put` gets the name (the key without the prefix), the new and the previous record (or
        None); `on_delete` gets the name and the last record. `on_change` is called after each batch
        or call that changed anything. With `resync`, errors are logged, and all keys are listed
        again after a pause; the block may begin during an outage. Without it, `wait_failed` raises
        the error.
        """
        self._store = store
        self._prefix = prefix
        self._parse = parse
        self._on_put = on_put
        self._on_delete = on_delete
        self._on_change = on_change
        self._resync = resync
        self._records: dict[str, T] = {}
        self._revisions: dict[str, Revision] = {}
        self._watched = Revision(0)
        """Revision of the newest batch."""
        self._in_sync = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "PrefixMirror[T]":
        """Start following. Without `resync`, wait for the first listing, and raise what the store
        raises."""
        self._task = asyncio.create_task(self._follow(), name=f"mirror {self._prefix}")
        if not self._resync:
            try:
                await self.wait_in_sync()
            except BaseException:
                await cancel(self._task)
                raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        await cancel(self._task)

    @property
    def records(self) -> Mapping[str, T]:
        return MappingProxyType(self._records)

    def get(self, name: str) -> T | None:
        return self._records.get(name)

    @property
    def is_in_sync(self) -> bool:
        """True if the last listing is applied, and the watch continues from it."""
        return self._in_sync.is_set()

    async def wait_in_sync(self) -> None:
        assert self._task is not None
        await wait_first(self._in_sync.wait(), self._task)
        if not self.is_in_sync:
            await asyncio.shield(self._task)

    async def wait_failed(self) -> None:
        """Wait until the mirror ends, and raise its error. With `resync`, it does not end by
        itself."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def look_up(self, name: str) -> T | None:
        """Read a record from etcd now, and keep it; None if there is none.

        An unreadable record does not replace the known one.
        """
        known = self._revisions.get(name)
        found = await self._store.get(self._prefix + name)
        if found is not None:
            self.note(found)
        elif self._revisions.get(name) == known:
            # Otherwise the watch has delivered a newer change meanwhile.
            self.forget(name)
        return self.get(name)

    def note(self, item: MirroredKey | KeyValue) -> None:
        """Apply an item from outside the watch, unless a newer revision of the key is known, or the
        watch has already reached the item's revision."""
        self.note_all([item])

    def note_all(self, items: Iterable[MirroredKey | KeyValue]) -> None:
        """Apply items from outside the watch, each as `note` does."""
        # The watch has delivered the other items, and perhaps their deletion.
        new = [item for item in items if item.mod_revision > self._watched]
        changed = [self._put(MirroredKey(i.key, i.value, i.mod_revision)) for i in new]
        if any(changed):
            self._on_change()

    def forget(self, name: str) -> None:
        """Drop the record of a missing key."""
        if self._delete(name):
            self._on_change()

    async def _follow(self) -> None:
        pauses = BackOff(RESYNC_PAUSE_S)
        while True:
            try:
                async with aclosing(list_and_watch(self._store, self._prefix)) as batches:
                    async for batch in batches:
                        self._apply(batch)
                        self._in_sync.set()
            except ShoalError as error:
                self._in_sync.clear()
                if not self._resync:
                    raise
                log.warning("mirror_interrupted", prefix=self._prefix, reason=str(error))
            except Exception:
                # A callback failed on one change: another listing applies the later ones.
                self._in_sync.clear()
                if not self._resync:
                    raise
                log.exception("mirror_failed", prefix=self._prefix)
            await asyncio.sleep(pauses.pause_s())

    def _apply(self, batch: WatchBatch) -> None:
        changed = False
        if batch.reset:
            present = {event.key for event in batch.events if event.kind is EventKind.PUT}
            for name in [each for each in self._records if self._prefix + each not in present]:
                # `note` may know a key that was written since the listing.
                if self._revisions[name] <= batch.revision:
                    changed = self._delete(name) or changed
        for event in batch.events:
            if event.kind is EventKind.PUT:
                changed = self._put(_item(event)) or changed
            else:
                name = event.key.removeprefix(self._prefix)
                if self._revisions.get(name, 0) <= event.mod_revision:
                    changed = self._delete(name) or changed
        self._watched = batch.revision
        if changed:
            self._on_change()

    def _put(self, item: MirroredKey) -> bool:
        name = item.key.removeprefix(self._prefix)
        if self._revisions.get(name, 0) >= item.mod_revision:
            return False
        try:
            record = self._parse(item)
        except ShoalError as error:
            log.error("record_unreadable", key=item.key, reason=str(error))
            return False
        if record is None:
            return self._delete(name)
        before = self._records.get(name)
        self._records[name], self._revisions[name] = record, item.mod_revision
        self._on_put(name, record, before)
        return True

    def _delete(self, name: str) -> bool:
        self._revisions.pop(name, None)
        if name not in self._records:
            return False
        self._on_delete(name, self._records.pop(name))
        return True


def _item(event: WatchEvent) -> MirroredKey:
    return MirroredKey(event.key, event.value, event.mod_revision)
