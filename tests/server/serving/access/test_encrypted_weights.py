"""Published weights are sent to other machines over TLS, and each series only to its readers."""

import os
import socket
import ssl
import uuid
from contextlib import ExitStack, closing

import pytest
from support.clusters.tls_world import TlsWorld
from support.weights.segments import segment_of

from shoal_client.weights.publisher import SeriesPublisher
from shoal_client.weights.reader import SeriesReader
from shoal_client.weights.stores import WeightStores
from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import AccessDenied, CertificateRefused
from shoal_proto.segments import transfer
from shoal_proto.segments.transfer import StagedSegment
from shoal_proto.tls import identity
from shoal_proto.tls.names import Caller, CertificateRole
from shoal_proto.tls.sockets import secured
from shoal_proto.v1 import weights_pb2 as pb

NUM_BYTES = 2 * CHUNK_BYTES + 2
LIMIT_S = 30.0


def published(world: TlsWorld, series: str, *, may_be_local: bool = True) -> bytes:
    """Publish a version, and return its bytes."""
    data = os.urandom(NUM_BYTES)
    publisher = pb.Publisher(incarnation=str(uuid.uuid4()))
    layout = pb.Layout(
        tensors=[pb.TensorSpec(name="w", dtype="bfloat16", shape=[NUM_BYTES // 2])],
        slices=[pb.Slice()],
        segment_bytes=[NUM_BYTES],
    )
    with (
        identity.using(world.files(CertificateRole.WORKER)),
        closing(
            SeriesPublisher(
                [world.cluster.coordinator], series, lambda: publisher, may_be_local=may_be_local
            )
        ) as own,
    ):
        own.contribute(segment_of(data), layout, publication=1, timeout_s=LIMIT_S)
    return data


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("may_be_local", [True, False], ids=["descriptor", "tls"])
def test_a_reader_fetches_its_series(
    world: TlsWorld, may_be_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket for other machines is encrypted, of the publisher and of the reader."""
    reached: list[socket.socket] = []

    def noted(connected: socket.socket, name: str) -> socket.socket:
        reached.append(secured(connected, name))
        return reached[-1]

    monkeypatch.setattr(transfer, "secured", noted)
    series = f"svc/by-{may_be_local}"
    data = published(world, series, may_be_local=may_be_local)
    caller = Caller(CertificateRole.READER, f"reads-{may_be_local}", series=series)
    with identity.using(world.issued(caller)):
        reader = SeriesReader(
            [world.cluster.coordinator], series, "reader", may_be_local=may_be_local
        )
        with closing(reader):
            (segment,) = reader.fetch(reader.wait(0, LIMIT_S))
            assert segment.view() == data
    assert {isinstance(each, ssl.SSLSocket) for each in reached} == {not may_be_local}


def test_a_reader_of_another_series_is_refused(world: TlsWorld) -> None:
    data = published(world, "svc/secret")
    digest = segment_of(data).digest
    servers = [
        pb.StoreServer(id="ps-0", address=address) for address in world.cluster.parameter_servers
    ]
    with identity.using(
        world.issued(Caller(CertificateRole.READER, "reads-another", series="svc/open"))
    ):
        for series in ("svc/secret", "svc/open"):
            with closing(WeightStores(series)) as stores, pytest.raises(Exception) as refused:
                stores.fetch(servers, StagedSegment(digest), LIMIT_S)
            # The reader may make the call for its own series, which has no such segment.
            assert isinstance(refused.value, AccessDenied) == (series == "svc/secret")
        with (
            closing(SeriesReader([world.cluster.coordinator], "svc/secret", "r")) as reader,
            pytest.raises(AccessDenied, match="another series"),
        ):
            reader.wait(0, LIMIT_S)


def test_a_reader_cannot_store_segments(world: TlsWorld) -> None:
    segment = segment_of(b"forged")
    described = pb.Segment(digest=segment.digest, num_bytes=segment.num_bytes)
    request = pb.PutSegmentRequest(series="svc/open", epoch=1, segment=described)
    server = pb.StoreServer(id="ps-0", address=world.cluster.parameter_servers[0])
    with (
        identity.using(world.issued(Caller(CertificateRole.READER, "puts", series="svc/open"))),
        closing(WeightStores("svc/open")) as stores,
        pytest.raises(AccessDenied),
    ):
        stores.put(server, request, segment, LIMIT_S)


def relaying(world: TlsWorld, series: str, name: str) -> SeriesReader:
    return SeriesReader(
        [world.cluster.coordinator], series, name, may_be_local=False, relay_at="127.0.0.1"
    )


def test_a_relay_serves_only_readers_of_its_series(
    world: TlsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections from and to the relay use TLS."""
    series = "svc/relayed"
    data = published(world, series)
    digest = segment_of(data).digest
    reached: list[socket.socket] = []

    def noted(connected: socket.socket, name: str) -> socket.socket:
        reached.append(secured(connected, name))
        return reached[-1]

    monkeypatch.setattr(transfer, "secured", noted)
    with ExitStack() as stack:
        own = Caller(CertificateRole.READER, "reads-relayed", series=series)
        with identity.using(world.issued(own)):
            relay = stack.enter_context(closing(relaying(world, series, "relay")))
            record = relay.wait(0, LIMIT_S)
            relay.fetch(record)
            relay.report(record.number, record.digest)
            with closing(relaying(world, series, "child")) as child:
                (segment,) = child.fetch(record)
                assert segment.view() == data
                assert child.relayed_bytes == len(data)
        assert {type(each) for each in reached} == {ssl.SSLSocket}
        server = pb.StoreServer(id="relay", address=relay.relay_address)
        other = Caller(CertificateRole.READER, "reads-open", series="svc/open")
        with (
            identity.using(world.issued(other)),
            closing(WeightStores(series, may_be_local=False, of_relays=True)) as stores,
            pytest.raises(AccessDenied, match="its own series"),
        ):
            stores.fetch([server], StagedSegment(digest), LIMIT_S)


def test_a_relay_without_a_readers_certificate_is_refused(world: TlsWorld) -> None:
    with (
        identity.using(world.files(CertificateRole.WORKER)),
        pytest.raises(CertificateRefused, match="a reader's certificate"),
    ):
        relaying(world, "svc/relayed", "refused")
