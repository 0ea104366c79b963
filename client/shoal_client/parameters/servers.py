"""Calls to all servers of a job's shards, until each shard is done."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Generic, TypeVar

import grpc
import structlog

from shoal_client.connection.certificate_wait import CertificateWait, wait_s
from shoal_client.connection.coordinators import Channels, chance, close_channels
from shoal_client.connection.tls_refusals import explained, note_answer
from shoal_proto import routes
from shoal_proto.back_off import BackOff
from shoal_proto.errors import (
    CertificateRefused,
    DeadlineExceeded,
    DiskFull,
    InvalidSpec,
    RetryError,
    ShardNotReady,
    ShoalError,
    StateLost,
    Unavailable,
    WrongEpoch,
)
from shoal_proto.short_lists import short_list
from shoal_proto.status import from_rpc_error, is_explained
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.traces.log_limit import LogLimit
from shoal_proto.v1.shards_pb2 import Shard, ShardMap

log = structlog.get_logger(__name__)

MAX_REDIRECTS = 4
MAX_SERVERS = 64
"""Threads that call servers, beside the caller's own; further calls wait."""

Stub = TypeVar("Stub")
Attempt = Callable[[Stub, Sequence[Shard], float, set[int]], None]
"""A call to one server about some of its shards, within a time in seconds. Removes the ids of
shards that are done from the set; raises an error for the others."""


class ShardServers(Generic[Stub]):
    """Connections to the parameter servers, for one thread at a time, except `close`."""

    def __init__(
        self,
        stub_of: Callable[[str, grpc.Channel], Stub],
        timeout_s: float,
        close_stub: Callable[[Stub], None] = lambda stub: None,
    ) -> None:
        """`stub_of`: makes the stub for a server, once for each channel."""
        self._process = os.getpid()
        self._stub_of = stub_of
        self._close_stub = close_stub
        self._timeout_s = timeout_s
        self.lost_wait_s = 0.0
        """A call waits this long, from its beginning, for servers that ended and for lost
        shards."""
        self._closed = threading.Event()
        self._log = LogLimit(log)
        self._lock = threading.Lock()
        self._channels = Channels(SERVER_NAME)
        self._reached: dict[str, tuple[grpc.Channel, Stub]] = {}
        """The newest stub to each address, with its channel."""
        self._stub_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """A stub is for one thread at a time."""
        self._ahead: dict[str, Future[None]] = {}
        """Connections that are being opened ahead of a first call."""
        self._has_connected = False
        """True once a server has answered: later calls wait for a renewed certificate."""
        self._pool = ThreadPoolExecutor(MAX_SERVERS, thread_name_prefix="shoal-parameters")

    def run(
        self,
        shard_map: Callable[[], ShardMap],
        refetch: Callable[[], None],
        attempt: Attempt[Stub],
        ready_by_s: float,
        shard_ids: Collection[int] | None = None,
    ) -> int:
        """Attempt until all shards of the map, or of `shard_ids`, are done; return the rounds
        beyond the first, plus the longest chain of redirects of each round.

        Temporary failures are retried for `timeout_s`. Other limits: none for space on a full disk,
        SHOAL_CERTIFICATE_WAIT_S for a renewed certificate once a server has answered, `lost_wait_s`
        for lost shards, and `ready_by_s` of the monotonic clock for shards without values. Raises
        the error that ended the attempts; instead of a DeadlineExceeded, the last other error, if
        any. Raises InvalidSpec in a forked process.
        """
        self._check_process()
        deadline_s = time.monotonic() + self._timeout_s
        back_off = BackOff()
        todo = {shard.shard_id for shard in shard_map().shards}
        if shard_ids is not None:
            todo.intersection_update(shard_ids)
        if not todo:
            return 0
        retries = 0
        reason: ShoalError | None = None
        lost_deadline_s = time.monotonic() + self.lost_wait_s
        certificate = CertificateWait(wait_s())
        while True:
            held = [shard for shard in shard_map().shards if shard.shard_id in todo]
            errors, redirects = self._attempt_all(
                attempt, held, todo, deadline_s - time.monotonic()
            )
            retries += redirects
            # A connection may break after its last shard was done.
            if not todo and all(isinstance(error, RetryError) for error in errors):
                return retries
            worst = most_severe(errors) if errors else _incomplete(todo)
            deadline_s = self._extended_deadline_s(deadline_s, errors, reason, lost_deadline_s)
            is_waited_for = False
            if isinstance(worst, CertificateRefused) and self._has_connected:
                is_waited_for = certificate.record_refusal(time.monotonic())
                if not is_waited_for:
                    worst = certificate.final_error(worst)
            if _apply_redirects(held, errors) and time.monotonic() < deadline_s:
                retries += 1
                continue
            pause_s = back_off.pause_s(chance())
            next_s = time.monotonic() + pause_s
            out_of_time = next_s >= deadline_s or (
                isinstance(worst, ShardNotReady) and next_s >= ready_by_s
            )
            if not isinstance(worst, DeadlineExceeded):
                reason = worst
            can_succeed = (
                isinstance(worst, RetryError)
                or is_waited_for
                or _comes_back(worst, lost_deadline_s)
            )
            if not can_succeed or out_of_time or self._closed.is_set():
                raise reason or worst
            retries += 1
            self._log.info("parameters_call_retried", num_shards=len(todo), reason=str(worst))
            self._closed.wait(pause_s)
            if any(isinstance(error, WrongEpoch | Unavailable | StateLost) for error in errors):
                refetch()
                # Close the other connections: gRPC would try to open them again for ever.
                self._keep_only({shard.address for shard in shard_map().shards})

    def _check_process(self) -> None:
        """Raise InvalidSpec in a forked process: it shares sockets and push numbers with its
        parent, and locks held at the fork are never released."""
        if os.getpid() != self._process:
            raise InvalidSpec(
                "the parameter client belongs to another process, from which this one was forked",
                seen=f"process {os.getpid()}",
                expected=f"process {self._process}",
                fix="Let this process open its own client, or start it by spawn or forkserver.",
            )

    def _extended_deadline_s(
        self,
        deadline_s: float,
        errors: Sequence[ShoalError],
        before: ShoalError | None,
        lost_deadline_s: float,
    ) -> float:
        """Return `deadline_s`, or a later time for an error with a longer wait. `before`: the error
        of the last round."""
        for error in errors:
            if isinstance(error, DiskFull):
                event = "waiting_for_disk_space"
            elif isinstance(error, CertificateRefused) and self._has_connected:
                event = "certificate_refused"
            elif _comes_back(error, lost_deadline_s):
                event = "waiting_for_lost_shards"
            elif isinstance(error, Unavailable) and deadline_s < lost_deadline_s:
                # The server's shards are not declared lost yet.
                log.info("waiting_for_lost_servers", reason=str(error))
                deadline_s = lost_deadline_s
                continue
            else:
                continue
            if type(before) is not type(error):
                log.warning(event, reason=str(error))
            return time.monotonic() + self._timeout_s
        return deadline_s

    def _attempt_all(
        self, attempt: Attempt[Stub], shards: Sequence[Shard], todo: set[int], timeout_s: float
    ) -> tuple[list[ShoalError], int]:
        *others, last = _by_address(shards).items()

        deadline_s = time.monotonic() + timeout_s
        redirects: list[int] = []

        def once(address: str, held: Sequence[Shard]) -> ShoalError | None:
            left_s = max(deadline_s - time.monotonic(), 0.01)
            try:
                if not address:
                    raise _no_address(held, left_s)
                with self._stub_lock(address):
                    # A redirect may lead to a server that another thread is calling.
                    attempt(self._stub(address), held, left_s, todo)
                note_answer(address)
                self._has_connected = True
            except grpc.RpcError as rpc_error:
                error = explained(from_rpc_error(rpc_error, address), address, SERVER_NAME)
                is_silent = type(error) is Unavailable and not is_explained(rpc_error)
                return _no_answer(address, held, error) if is_silent else error
            except ShoalError as refusal:
                return refusal
            except ValueError:
                # gRPC's error for a channel that was closed meanwhile.
                if not self._closed.is_set():
                    raise
                return _closed_error()
            return None

        def run(address: str, held: Sequence[Shard]) -> ShoalError | None:
            error = once(address, held)
            for number in range(MAX_REDIRECTS):
                left = [shard for shard in held if shard.shard_id in todo]
                if error is None or not left or not _apply_redirects(left, [error]):
                    break
                redirects.append(number + 1)
                found = [once(*each) for each in _by_address(left).items()]
                errors = [each for each in found if each is not None]
                error = most_severe(errors) if errors else None
            return error

        # With a single server no other thread is needed.
        try:
            futures = [self._pool.submit(run, address, held) for address, held in others]
        except RuntimeError:
            # The pool's error after `close`.
            if not self._closed.is_set():
                raise
            return [_closed_error()], 0
        results = [run(*last), *(future.result() for future in futures)]
        return [error for error in results if error is not None], max(redirects, default=0)

    def connect_ahead(self, address: str, connect: Callable[[Stub], None]) -> None:
        """Connect in the background to a server that is about to be called. A failure is only
        logged."""
        with self._lock:
            if self._closed.is_set() or address in self._reached or address in self._ahead:
                return
            self._ahead[address] = self._pool.submit(self._connect_ahead, address, connect)

    def _connect_ahead(self, address: str, connect: Callable[[Stub], None]) -> None:
        try:
            connect(self._stub_for(address))
        except (grpc.RpcError, ShoalError, ValueError) as error:
            log.info("not_connected_ahead", address=address, reason=str(error))

    def _stub_lock(self, address: str) -> threading.Lock:
        with self._lock:
            return self._stub_locks[address]

    def _stub(self, address: str) -> Stub:
        with self._lock:
            ahead = self._ahead.pop(address, None)
        # If `connect` still waits for a thread of the pool, drop it: all threads may be waiting
        # here. Else wait for its end: a stub is for one thread at a time.
        if ahead is not None and not ahead.cancel():
            ahead.result()
        return self._stub_for(address)

    def _stub_for(self, address: str) -> Stub:
        with self._lock:
            if self._closed.is_set():
                raise _closed_error()
            channel = self._channels.channel_to(address)
            reached = self._reached.get(address)
            if reached is not None and reached[0] is channel:
                return reached[1]
            stub = self._stub_of(address, channel)
            self._reached[address] = channel, stub
        if reached is not None:
            # The stub has an outdated certificate. The caller holds this address' lock, so no call
            # uses the stub.
            self._close_stub(reached[1])
        return stub

    @property
    def stubs(self) -> dict[str, Stub]:
        """Stubs of the connected servers, by address."""
        with self._lock:
            return {address: stub for address, (_, stub) in self._reached.items()}

    def close(self) -> None:
        """Close every connection; calls in progress fail. Does nothing in a forked process: the
        connections are its parent's."""
        if os.getpid() != self._process:
            return
        self._closed.set()
        self._keep_only(())
        self._pool.shutdown(wait=False)

    def _keep_only(self, addresses: Collection[str]) -> None:
        with self._lock:
            gone = [self._reached.pop(a)[1] for a in list(self._reached) if a not in addresses]
            channels = self._channels.pop_all(keep=addresses)
        for stub in gone:
            self._close_stub(stub)
        close_channels(channels)


def most_severe(errors: Sequence[ShoalError]) -> ShoalError:
    """The error that decides what follows: preferably one that forbids a retry, then one without a
    redirect. A redirect gets the routes of all errors."""
    worst = min(
        errors,
        key=lambda error: (
            isinstance(error, RetryError),
            # Allows a wait, so it is last among errors that forbid a retry.
            isinstance(error, StateLost),
            _has_route(error),
        ),
    )
    return routes.gather(worst, errors)


def _comes_back(error: ShoalError, lost_deadline_s: float) -> bool:
    return isinstance(error, StateLost) and time.monotonic() < lost_deadline_s


def _has_route(error: ShoalError) -> bool:
    return isinstance(error, WrongEpoch) and bool(routes.from_error(error))


def _apply_redirects(shards: Sequence[Shard], errors: Sequence[ShoalError]) -> bool:
    """Update the shards with the primaries that the errors name. True if each error named a newer
    primary: the next attempt need not wait."""
    by_id = {shard.shard_id: shard for shard in shards}
    redirects = [
        routes.from_error(error) if isinstance(error, WrongEpoch) else [] for error in errors
    ]
    newer_routes = [
        [r for r in found if r.shard_id in by_id and r.epoch > by_id[r.shard_id].epoch]
        for found in redirects
    ]
    for route in sorted(chain.from_iterable(newer_routes), key=lambda route: route.epoch):
        shard = by_id[route.shard_id]
        shard.epoch, shard.server_id = route.epoch, route.server_id
        shard.address = route.address
    return bool(newer_routes) and all(newer_routes)


def _by_address(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    grouped: dict[str, list[Shard]] = {}
    for shard in shards:
        grouped.setdefault(shard.address, []).append(shard)
    return grouped


def _incomplete(todo: set[int]) -> ShoalError:
    return Unavailable(
        "a server ended its answer early", seen=f"nothing of {len(todo)} shards", expected="all"
    )


def _no_address(shards: Sequence[Shard], left_s: float) -> ShoalError:
    """Error for shards that have no registered server, and no other primary yet."""
    servers = sorted({shard.server_id for shard in shards})
    return Unavailable(
        f"no primary serves shard {_one_named(shards)}",
        seen=f"no address of {', '.join(servers)}, the last primary of {_them(shards)}",
        expected="that server to return, or a backup to become primary, within the"
        f" {max(left_s, 0.0):.0f} s that are left of this call",
        fix="`shoal status` shows the servers, and what is lost.",
    )


def _no_answer(address: str, shards: Sequence[Shard], error: ShoalError) -> ShoalError:
    """Error for a server that does not answer. The server is still registered."""
    return Unavailable(
        f"no answer from server {shards[0].server_id} at {address}, the primary of"
        f" shard {_one_named(shards)}",
        seen=error.seen,
        expected="that server to answer, or a backup to become primary",
        fix="If it has ended, start it again, with its journal if it had one. For up to 15 minutes"
        f" it may still count as the primary of {_them(shards)}, and nothing is restored"
        " automatically. `shoal status` shows the servers, and what is lost; `shoal restore JOB`"
        " and `shoal accept-loss JOB` are for shards that stay lost.",
    )


def _one_named(shards: Sequence[Shard]) -> str:
    return short_list((str(shard.shard_id) for shard in shards), 1)


def _them(shards: Sequence[Shard]) -> str:
    return "them" if len(shards) > 1 else "it"


def _closed_error() -> ShoalError:
    return Unavailable("the connection to the parameter servers was closed")
