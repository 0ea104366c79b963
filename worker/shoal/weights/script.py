"""`shoal.subscribe` and `shoal.publish`, for processes that are not members of a job."""

import atexit
import os
import threading
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shoal.weights.series import (
    CLOSE_S,
    Contributor,
    PendingPublication,
    Publications,
    PublisherRank,
    SeriesOptions,
    held_state,
)
from shoal.weights.subscription import Subscription, reader_id, version_lookup
from shoal_client.connection.coordinators import own_address
from shoal_client.weights.publisher import SeriesPublisher
from shoal_client.weights.reader import SeriesReader
from shoal_difference.codec import apply
from shoal_proto.errors import InvalidSpec
from shoal_proto.incarnation import new_incarnation
from shoal_proto.names import SERIES_RULE, check_name, is_series
from shoal_proto.numbers_given import as_index
from shoal_proto.terminal import configure_script_log
from shoal_proto.tls import identity
from shoal_proto.v1 import weights_pb2

COORDINATOR_VARIABLE = "SHOAL_COORDINATOR"
ADDRESS_VARIABLE = "SHOAL_ADDRESS"
MAX_STEP = 2**53 - 1
"""Limit of the coordinator."""
ALONE = PublisherRank(number=0, rank=0, world_size=1)


def subscribe(
    series: str,
    *,
    coordinator: str | None = None,
    reader: str | None = None,
    tables: bool = False,
    relay: bool = False,
) -> Subscription:
    """Subscribe to a series, `JOB/NAME`, from any process: rollout engine, evaluator or server.

        with shoal.subscribe("rl-job/policy", coordinator="host:7700") as policy:
            version = policy.wait(timeout=60)
            policy.fetch(version, into=model)

    `coordinator`: host:port of each replica, separated by commas; by default SHOAL_COORDINATOR.
    `reader`: the reader's name in `shoal status`, to which a suffix is appended, so that several
    processes may use one name; by default host and process id. TLS as for `shoal.join`.
    Does not wait for a coordinator: the subscription's calls do.

    `tables`: also fetch the rows of embedding tables, from the same cut as the parameters, and find
    the rows that have changed since the installed version: see `Weights.changes`. The installed
    rows stay in memory.

    `relay`: fetch from other relaying readers, and send fetched versions to at most two of them at
    a time. So the servers send each version about once. A relay keeps in memory the newest version
    that it has fetched, and any version that is arriving. It listens on free ports at
    SHOAL_ADDRESS, by default the address of the interface towards the coordinator. A relay on the
    host of one of the series' servers sends nothing to other readers.

    Raises InvalidSpec for invalid names, if there is no coordinator's address, for wrong settings
    of TLS or SHOAL_TRANSPORT, and for a relay with tables. For a relay also raises Unavailable if
    no port is free or no route leads to a coordinator, and CertificateRefused if its certificate is
    not a reader's.
    """
    addresses = _connected(series, coordinator)
    reader = reader_id(reader)
    check_name(reader, "reader")
    relay_at = None
    if relay:
        if tables:
            raise InvalidSpec(
                "rows of tables are not relayed",
                seen="relay=True with tables=True",
                expected="one of the two",
            )
        relay_at = os.environ.get(ADDRESS_VARIABLE) or own_address(addresses)
    series_reader = SeriesReader(
        addresses, series, reader, apply_difference=apply, relay_at=relay_at
    )
    return Subscription(series_reader, series, tables=tables)


def publish(
    series: str,
    state: Mapping[str, Tensor] | nn.Module,
    *,
    coordinator: str | None = None,
    step: int = 0,
    metadata: Mapping[str, object] | None = None,
    keep: int = 2,
    copies: int = 2,
    dtype: torch.dtype | None = None,
) -> PendingPublication:
    """Publish tensors by name, or a module, as the next version of a series, from outside a job.

        shoal.publish("ranking/model", model, coordinator="host:7700").wait()

    Returns once the tensors are copied, and sends them in the background: see
    `PendingPublication.wait`. First waits for the previous publication of this series, and for
    other threads' calls that concern this series.

    This process then holds the series until `end_publishing`, the end of this process or the end of
    its lease. Publications by a process that does not hold the series fail with SeriesHeld. `step`:
    an integer from 0 to 2**53 - 1. Options: see `session.series`; options of later calls are
    ignored.

    Raises InvalidSpec for wrong arguments, and Overloaded if there is no memory for the copy;
    `PendingPublication.wait` raises all other errors.
    """
    step = as_index("step", step, least=0, most=MAX_STEP)
    addresses = _connected(series, coordinator)
    options = SeriesOptions(keep=keep, copies=copies, dtype=dtype)
    return _held.of(addresses, series).publish(state, options, step, metadata)


def end_publishing(series: str) -> None:
    """Release a series; do nothing if this process does not hold it.

    Waits up to 30 s for a publication in progress, and then abandons it; a waiting publication of
    another thread gets another 30 s. Another process can then publish at once, unless no
    coordinator answers within 1 s.
    """
    for published in _held.named(series):
        published.close()


class _PublishedSeries:
    """A series that this process publishes, or has published. Thread-safe; calls wait for each
    other.
    """

    def __init__(self, addresses: tuple[str, ...], series: str) -> None:
        self._addresses, self._series = addresses, series
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._publications: Publications | None = None
        """None unless this process holds the series."""
        self._count = 0

    def publish(
        self,
        state: Mapping[str, Tensor] | nn.Module,
        options: SeriesOptions,
        step: int,
        metadata: Mapping[str, object] | None,
    ) -> PendingPublication:
        with self._lock:
            held = held_state(state, step=step, rank=0, world_size=1)
            if self._publications is None:
                connect = partial(self._connect, options, new_incarnation())
                look = version_lookup(self._addresses, self._series)
                self._publications = Publications(self._series, connect, options, look)
                self._count = 0
            self._count += 1
            return self._publications.publish(
                held, ALONE, metadata, number=self._count, is_over=self._is_ending.is_set
            )

    def _connect(
        self, options: SeriesOptions, incarnation: str, publisher: PublisherRank
    ) -> Contributor:
        return SeriesPublisher(
            self._addresses,
            self._series,
            lambda: weights_pb2.Publisher(incarnation=incarnation),
            rank=publisher.rank,
            world=publisher.world_size,
            options=options.to_message(),
        )

    def close(self) -> None:
        if not self._lock.acquire(timeout=CLOSE_S):
            # Another thread waits to publish: abandon its publication, and the one before it.
            self._is_ending.set()
            self._lock.acquire()
        # A publication that began since has its own time to end.
        self._is_ending.clear()
        try:
            if self._publications is not None:
                self._publications.close()
                self._publications = None
        finally:
            self._lock.release()


class _OpenSeries:
    """All series that this process publishes, released when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[tuple[tuple[str, ...], str], _PublishedSeries] = {}
        self._parents: list[_PublishedSeries] = []
        """Series of the parent process: deleting them would use the parent's connections."""
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def of(self, addresses: tuple[str, ...], series: str) -> _PublishedSeries:
        with self._lock:
            key = addresses, series
            if key not in self._series:
                self._series[key] = _PublishedSeries(addresses, series)
            return self._series[key]

    def named(self, series: str | None = None) -> list[_PublishedSeries]:
        with self._lock:
            return [each for key, each in self._series.items() if series in (None, key[1])]

    def close(self) -> None:
        for published in self.named():
            published.close()

    def _forget(self) -> None:
        """Forget all series in a forked process: closing them breaks the parent's connections."""
        self._lock = threading.Lock()
        self._parents += self._series.values()
        self._series = {}


_held = _OpenSeries()


def _connected(series: str, coordinator: str | None) -> tuple[str, ...]:
    """Return the coordinators' addresses. Configures the process's log, and sets its certificate if
    it has none.

    Raises InvalidSpec.
    """
    configure_script_log(os.environ)
    if not is_series(series):
        raise InvalidSpec("bad name of a series", seen=repr(series), expected=SERIES_RULE)
    text = coordinator or os.environ.get(COORDINATOR_VARIABLE, "")
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses:
        raise InvalidSpec(
            "no coordinator was named",
            expected="host:port of one or more coordinators",
            fix=f"Pass coordinator='host:port', or set {COORDINATOR_VARIABLE}.",
        )
    if identity.own() is None:
        identity.use(identity.from_environment(os.environ, addresses))
    return addresses
