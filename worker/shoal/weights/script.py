"""`shoal.subscribe` and `shoal.publish`: weights for processes that are no members of a job."""

import atexit
import os
import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.weights.series import (
    Contributor,
    Publications,
    PublisherRank,
    SeriesOptions,
    Ticket,
    held_state,
)
from shoal.weights.subscription import Subscription, looking_at, reader_id
from shoal_client.connection.coordinators import own_address
from shoal_client.weights.publisher import SeriesPublisher
from shoal_client.weights.reader import SeriesReader
from shoal_difference.codec import apply
from shoal_proto.errors import InvalidSpec
from shoal_proto.incarnation import new_incarnation
from shoal_proto.names import SERIES_RULE, check_name, is_series
from shoal_proto.numbers_given import as_index
from shoal_proto.tls import identity
from shoal_proto.v1 import weights_pb2

COORDINATOR_VARIABLE = "SHOAL_COORDINATOR"
ADDRESS_VARIABLE = "SHOAL_ADDRESS"
ALONE = PublisherRank(number=0, rank=0, world_size=1)


def subscribe(
    series: str,
    *,
    coordinator: str | None = None,
    reader: str | None = None,
    tables: bool = False,
    relay: bool = False,
) -> Subscription:
    """A reader of a series, `JOB/NAME`, for any process: a rollout engine, an evaluator, a server.

        with shoal.subscribe("rl-job/policy", coordinator="host:7700") as policy:
            version = policy.wait(timeout=60)
            policy.fetch(version, into=model)

    `coordinator`: host:port of the replicas, separated by commas; by default SHOAL_COORDINATOR.
    `reader` is the name under which `shoal status` shows it; by default one is made up. TLS as for
    `shoal.join`. Readers are no members: they hold nobody up, and may come and go.

    `tables`: fetch the rows of embedding tables too, as of the same cut as the parameters, and find
    out which have changed since the installed version; see `Weights.changes`. This process then
    keeps the rows of the installed version in memory.

    `relay`: fetch from other readers that relay, and pass on to at most two of them at a time what
    this one fetches, so that the servers send each version about once, whatever the number of
    readers. This process holds the newest version that it has fetched in memory, beside the one
    that is arriving. It takes free ports at SHOAL_ADDRESS, by default the address of the interface
    towards the coordinator. A relay beside a server of the series passes nothing on.

    Raises InvalidSpec for a name that no series can have and for a relay with tables, Unavailable
    if no coordinator answers, or a relay finds no port, CertificateRefused for a relay whose
    certificate is not a reader's.
    """
    addresses = _connected(series, coordinator)
    if reader is not None:
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
    own = SeriesReader(
        addresses, series, reader or reader_id(), apply_difference=apply, relay_at=relay_at
    )
    return Subscription(own, series, tables=tables)


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
) -> Ticket:
    """Publish tensors by name, or a module, as the next version of a series, from a script that is
    no member of a job.

        shoal.publish("ranking/model", model, coordinator="host:7700").wait()

    Returns once the tensors are copied; see `Ticket.wait`. This process then holds the series until
    it ends, or its lease does: another one is refused with SeriesHeld meanwhile, and gets the next
    number afterwards. `step` is a number of the script's own. Options as of `session.series`; those
    of the first call count.
    """
    step = as_index("step", step)
    addresses = _connected(series, coordinator)
    options = SeriesOptions(keep=keep, copies=copies, dtype=dtype)
    with _held.lock:
        own = _held.series.get((addresses, series))
        if own is None:
            own = _held.series[addresses, series] = _PublishedSeries(addresses, series, options)
        return own.publish(state, step, metadata)


def end_publishing(series: str) -> None:
    """Let go of a series that this process holds, once what is on its way is committed: another
    process may publish it at once."""
    with _held.lock:
        for key in [key for key in _held.series if key[1] == series]:
            _held.series.pop(key).publications.close()


class _PublishedSeries:
    """A series that this process publishes."""

    def __init__(self, addresses: tuple[str, ...], series: str, options: SeriesOptions) -> None:
        self._addresses, self._series = addresses, series
        self._incarnation = new_incarnation()
        self._count = 0
        look = looking_at(addresses, series)
        self.publications = Publications(series, self._connect, options, look)

    def publish(
        self,
        state: Mapping[str, Tensor] | nn.Module,
        step: int,
        metadata: Mapping[str, object] | None,
    ) -> Ticket:
        held = held_state(state, step=step, rank=0, world_size=1)
        self._count += 1
        return self.publications.publish(held, ALONE, metadata, number=self._count)

    def _connect(self, place: PublisherRank) -> Contributor:
        return SeriesPublisher(
            self._addresses,
            self._series,
            lambda: weights_pb2.Publisher(incarnation=self._incarnation),
            rank=place.rank,
            world=place.world_size,
            options=self.publications.options.to_message(),
        )


class _OpenSeries:
    """Series that this process publishes, released when it ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.series: dict[tuple[tuple[str, ...], str], _PublishedSeries] = {}
        atexit.register(self.close)

    def close(self) -> None:
        with self.lock:
            for own in self.series.values():
                own.publications.close()
            self.series.clear()


_held = _OpenSeries()


def _connected(series: str, coordinator: str | None) -> tuple[str, ...]:
    """Addresses of the coordinators, with the certificate for them in use."""
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
