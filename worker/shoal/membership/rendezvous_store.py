"""Store for `torch.distributed` with keys that the coordinator keeps for one generation: it
survives the loss of any host. Only members of the generation, by their tokens, have access."""

import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc

from shoal.backends.process_group.interface import ended_in_bring_up
from shoal.torch_private.c10d import Store
from shoal_client.connection.coordinators import Coordinators, Method
from shoal_client.membership.host_files import HostFiles
from shoal_proto.deflated import unpack
from shoal_proto.errors import DeadlineExceeded
from shoal_proto.v1 import rendezvous_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub

Value = str | bytes | Sequence[int]

# Margin of a call's deadline, within which the server answers that a wait has timed out.
_GRACE_S = 1.0
CALL_S = 300.0
"""Limit of one call's wait for a key."""
MIN_SHARED_KEYS = 64
"""Minimum number of keys in a read for which one rank reads on behalf of its whole host."""
MAX_VALUES_BYTES = 128 * 1024 * 1024
"""Limit of an answer: twice what a coordinator keeps for a generation by default."""
HOST_WAIT_S = 10.0
"""Limit of the wait for the rank that reads for its host. After that each rank reads itself."""


class RendezvousStores:
    """`GenerationStores` of a job with a cluster, over one connection to the coordinators."""

    is_shared = True

    def __init__(self, coordinators: Sequence[str], shared_directory: Path | None = None) -> None:
        """`coordinators`: host:port of each. `shared_directory`: folder of this host's ranks."""
        self._coordinators = Coordinators(coordinators)
        self._shared_directory = shared_directory

    def open(self, token: Token, timeout_s: float, *, once_a_host: bool = False) -> Store:
        directory = self._shared_directory if once_a_host else None
        return RendezvousStore(
            self._coordinators, token, timeout_s=timeout_s, shared_directory=directory
        )

    def close(self) -> None:
        self._coordinators.close()


class RendezvousStore(Store):
    """Store of one generation's keys. Thread-safe.

    Raises DeadlineExceeded for a key that is not set within the timeout, Fenced for a token out of
    date, and what `Coordinators.call` raises. After `abort`, calls in progress and later ones raise
    GenerationBroken.
    """

    def __init__(
        self,
        coordinators: Coordinators,
        token: Token,
        *,
        timeout_s: float,
        shared_directory: Path | None = None,
    ) -> None:
        """`shared_directory`: folder through which one of this host's ranks reads many values for
        all; such keys must be set only once."""
        super().__init__()
        self._ended = threading.Event()
        self._host: HostFiles | None = None
        if shared_directory is not None:
            self._host = HostFiles(shared_directory / "values", self._ended, HOST_WAIT_S)
        self._coordinators = coordinators
        self._token = token
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._in_progress: set[grpc.Future[pb.StoreReply]] = set()
        self._aborted = ""
        self._waited: dict[str, bytes] = {}

    def abort(self, reason: str) -> None:
        """End all calls, those in progress and later ones. Thread-safe."""
        with self._lock:
            self._aborted = self._aborted or reason
            self._ended.set()
            in_progress = list(self._in_progress)
        for call in in_progress:
            call.cancel()

    # --- called by torch, under Python's names and, if these differ, C++'s names ---

    def set(self, key: str, value: Value) -> None:
        self._set([(key, value)], append=False)

    def append(self, key: str, value: Value) -> None:
        self._set([(key, value)], append=True)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._set(list(zip(keys, values, strict=True)), append=False)

    def get(self, key: str) -> bytes:
        # torch requests each key twice, to wait and to read: one answer serves for both, unless
        # another call comes in between.
        with self._lock:
            value = self._waited.pop(key, None)
        return value if value is not None else self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._get(keys, self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = timeout.total_seconds() if timeout is not None else self._timeout_s
        values = self._get(keys, timeout_s)
        with self._lock:
            self._waited = dict(zip(keys, values, strict=True))

    def check(self, keys: Sequence[str]) -> bool:
        request = pb.StoreKeysRequest(token=self._token, keys=keys)
        return self._call(lambda stub: stub.Count, request).count == len(set(keys))

    def add(self, key: str, value: int) -> int:
        request = pb.StoreAddRequest(
            token=self._token, key=key, amount=value, call_id=_new_call_id()
        )
        return self._call(lambda stub: stub.Add, request).count

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        request = pb.StoreCompareSetRequest(
            token=self._token,
            key=key,
            expected=_bytes(expected_value),
            desired=_bytes(desired_value),
        )
        return self._call(lambda stub: stub.CompareSet, request).values[0]

    compareSet = compare_set  # noqa: N815

    def delete_key(self, key: str) -> bool:
        request = pb.StoreKeysRequest(token=self._token, keys=[key])
        return self._call(lambda stub: stub.Delete, request).count > 0

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return self._call(lambda stub: stub.Count, pb.StoreKeysRequest(token=self._token)).count

    getNumKeys = num_keys  # noqa: N815

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if self.add(f"{key}/arrived", 1) == world_size:
            self.set(f"{key}/released", b"1")
        self.wait([f"{key}/released"], timeout)

    def has_extended_api(self) -> bool:
        return True

    hasExtendedApi = has_extended_api  # noqa: N815

    def clone(self) -> "RendezvousStore":
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    # --- calls ---

    def _set(self, pairs: Sequence[tuple[str, Value]], *, append: bool) -> None:
        stored = [pb.StorePair(key=key, value=_bytes(value)) for key, value in pairs]
        request = pb.StoreSetRequest(token=self._token, pairs=stored, append=append)
        if append:
            request.call_id = _new_call_id()
        self._call(lambda stub: stub.Set, request)

    def _get(self, keys: Sequence[str], timeout_s: float) -> Sequence[bytes]:
        if self._host is None or len(keys) < MIN_SHARED_KEYS:
            reply = self._fetch(keys, timeout_s)
        else:
            file_key = "\0".join((self._token.job, str(self._token.generation), *keys))
            reply = pb.StoreReply.FromString(
                self._host.get(file_key, lambda: self._fetch(keys, timeout_s).SerializeToString())
            )
        if reply.deflated:
            return unpack(pb.StoreReply, reply.deflated, MAX_VALUES_BYTES).values
        return reply.values

    def _fetch(self, keys: Sequence[str], timeout_s: float) -> pb.StoreReply:
        # A coordinator limits the wait of one call.
        rest_s = timeout_s
        while True:
            call_s = min(rest_s, CALL_S)
            rest_s -= call_s
            request = pb.StoreGetRequest(token=self._token, keys=keys, timeout_s=call_s)
            try:
                return self._call(lambda stub: stub.Get, request, timeout_s=call_s)
            except DeadlineExceeded as error:
                if rest_s:
                    continue
                # Callers of torch's stores recognise this error by the word "timeout".
                raise DeadlineExceeded(
                    f"wait timeout after {timeout_s:g} s for {', '.join(keys)}",
                    seen=error.seen,
                    expected="every member of the generation to set its keys",
                    details={"keys": ",".join(keys)},
                ) from None

    def _call(
        self,
        method_of: Callable[[RendezvousStub], Any],
        request: Any,
        *,
        timeout_s: float | None = None,
    ) -> pb.StoreReply:
        with self._lock:
            self._waited = {}

        def bind(channel: grpc.Channel) -> Method[pb.StoreReply]:
            method = method_of(RendezvousStub(channel))

            def call(request: Any, /, *, timeout: float | None = None) -> pb.StoreReply:
                return self._follow(method.future(request, timeout=timeout))

            return call

        limit_s = (timeout_s if timeout_s is not None else self._timeout_s) + _GRACE_S
        return self._coordinators.call(bind, request, timeout_s=limit_s)

    def _follow(self, call: "grpc.Future[pb.StoreReply]") -> pb.StoreReply:
        with self._lock:
            self._in_progress.add(call)
            aborted = bool(self._aborted)
        if aborted:
            call.cancel()
        try:
            return call.result()
        except grpc.FutureCancelledError:
            raise ended_in_bring_up(self._token.generation, self._aborted) from None
        finally:
            with self._lock:
                self._in_progress.discard(call)


def _new_call_id() -> int:
    """Number by which the coordinator recognises a call that is repeated after a lost answer."""
    return secrets.randbits(64)


def _bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
