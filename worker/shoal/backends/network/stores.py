"""Stores for Gloo, which forward calls to the generation's store."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shoal.backends.network.compact_addresses import compact, expand, without_runs
from shoal.torch_private.c10d import Store
from shoal_proto.errors import GenerationBroken

MAX_ANNOUNCED_BYTES = 1 << 20
"""Limit of a Gloo address; longer values are not kept."""


class AnnouncingStore(Store):
    """Store that keeps all values that are set or read: some are addresses of listeners. After
    `abort`, a set or read raises GenerationBroken."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._values: dict[bytes, None] = {}
        self._aborted = ""

    def announced(self, end: bytes) -> bool:
        """True if a kept value contains this socket address."""
        return any(end in value for value in list(self._values))

    def abort(self, reason: str) -> None:
        self._aborted = reason
        self._inner.abort(reason)

    def _keep(self, value: Any) -> bytes:
        if self._aborted:
            raise GenerationBroken("the store was aborted", seen=self._aborted)
        kept = value.encode() if isinstance(value, str) else bytes(value)
        if len(kept) <= MAX_ANNOUNCED_BYTES:
            self._values[without_runs(kept)] = None
        return kept

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, self._keep(value))

    def get(self, key: str) -> bytes:
        return self._keep(self._inner.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._keep(value) for value in self._inner.multi_get(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._inner.multi_set(keys, [self._keep(value) for value in values])

    def append(self, key: str, value: Any) -> None:
        self._inner.append(key, value)

    def add(self, key: str, value: int) -> int:
        count: int = self._inner.add(key, value)
        return count

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, timeout) if timeout is not None else self._inner.wait(keys)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        value: bytes = self._inner.compare_set(key, expected_value, desired_value)
        return value

    compareSet = compare_set  # noqa: N815

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        count: int = self._inner.num_keys()
        return count

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return bool(self._inner.has_extended_api())

    hasExtendedApi = has_extended_api  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._inner.timeout
        return timeout

    def clone(self) -> "AnnouncingStore":
        return self


class AddressStore(AnnouncingStore):
    """Store for Gloo's bring-up: one call waits for the addresses of all ranks.

    Gloo sets PREFIX/RANK, then waits for PREFIX/0, PREFIX/1, ... and reads each value. The first
    wait is extended to all of these keys.
    """

    def __init__(
        self, inner: Any, rank: int, world_size: int, *, limit_s: float | None = None
    ) -> None:
        """`limit_s`: limit of the wait for addresses; None: the limit of Gloo's operations."""
        super().__init__(inner)
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._rank, self._world_size = rank, world_size
        self._awaited: list[str] = []
        self._prefixes: set[str] = set()
        self._has_addresses = False

    def set(self, key: str, value: Any) -> None:
        prefix, _, last = key.rpartition("/")
        if last != str(self._rank):
            super().set(key, value)
            return
        kept = self._keep(value)
        self._inner.set(key, compact(kept))
        self._prefixes.add(prefix)
        self._awaited = [f"{prefix}/{rank}" for rank in range(self._world_size)]
        self._has_addresses = False

    def get(self, key: str) -> bytes:
        return self._keep(self._address(key, self._inner.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._inner.multi_get(keys)
        return [self._keep(self._address(*each)) for each in zip(keys, values, strict=True)]

    def _address(self, key: str, value: bytes) -> bytes:
        prefix, _, last = key.rpartition("/")
        is_compact = prefix in self._prefixes and last.isdigit()
        return expand(bytes(value)) if is_compact else value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        are_addresses = set(keys) <= set(self._awaited)
        if are_addresses and self._has_addresses:
            return
        if are_addresses:
            keys, timeout = self._awaited, self._limit or timeout
        super().wait(keys, timeout)
        self._has_addresses = are_addresses
