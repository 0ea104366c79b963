"""Replication over shared memory, sockets and gRPC: the backup has the same values."""

import asyncio
import mmap
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from weakref import ref

import pytest
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_proto import bulk_opening
from shoal_proto.bulk import FrameKind
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.replication_pb2 import FollowReply, FollowRequest, PushRecord
from shoal_server.core.shards.shard_log import ShardLog
from shoal_server.parameters.bulk import arena_slots
from shoal_server.parameters.bulk.wire import FrameConnection
from shoal_server.parameters.replication.outgoing_record import OutgoingRecord
from shoal_server.parameters.replication.wire import frames, streams
from shoal_server.parameters.replication.wire.streams import BulkStream, GrpcStream
from shoal_server.parameters.service.bulk_connection import BulkCall
from shoal_server.parameters.shard.record import UpdateRecord

MODEL = OneTensor(1_500_000)
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0, momentum=0.5)])
NUM_PUSHES = 3


def by_port(offer: OpenBulkReply, address: str) -> socket.socket:
    offer.local_name = ""
    return bulk_opening.connect_to_offer(offer, address)


def refused(offer: OpenBulkReply, address: str) -> socket.socket:
    raise ConnectionRefusedError("not reachable")


TRANSPORTS = {"shared memory": bulk_opening.connect_to_offer, "tcp": by_port, "grpc": refused}


@pytest.mark.sampled()
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_backup_has_every_push(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backup leads the shards with the same values and momentum once the primary is gone."""
    written: list[str] = []
    for kind in (BulkStream, GrpcStream):
        write = kind.write

        async def noted(self, frame, *, write=write, name=kind.__name__):  # type: ignore[no-untyped-def]
            shared = getattr(self, "_slots", None) is not None
            written.append(f"{name}{' with slots' if shared else ''}")
            await write(self, frame)

        monkeypatch.setattr(kind, "write", noted)
    monkeypatch.setattr(streams, "connect_to_offer", TRANSPORTS[transport])
    values, expected = led_on_by_the_backup()
    assert values == {expected}
    assert set(written) == {
        {
            "shared memory": "BulkStream with slots",
            "tcp": "BulkStream",
            "grpc": "GrpcStream",
        }[transport]
    }


@contextmanager
def worker_that_has_pushed(servers: ParameterServers) -> Iterator[ParameterClient]:
    """Run a worker that has made `NUM_PUSHES` pushes."""
    token = servers.admit("w0")
    with closing(ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)) as client:
        client.place(MODEL.schema)
        client.create(MOMENTUM, MODEL.filled(0.0))
        client.pull(MODEL.filled(9.0))
        for _ in range(NUM_PUSHES):
            client.push(MODEL.filled(-1.0))
        yield client


def led_on_by_the_backup() -> tuple[set[float], float]:
    """Return the values, and the expected value, after pushes, a server's end and one more push."""
    with ParameterServers(2) as servers:
        with worker_that_has_pushed(servers) as client:
            servers.stop("ps-0")
            values = MODEL.filled(9.0)
            client.push(MODEL.filled(-1.0), into=values)
        expected = velocity = 0.0
        for _ in range(NUM_PUSHES + 1):
            velocity = 0.5 * velocity + 1.0
            expected += velocity
        return set(values["w"].cast("f")), expected


def test_replies_to_updates_in_shared_memory_are_sent_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers do not wait for these replies. The primary needs them to drop records that its backup
    has."""
    together: list[FollowReply] = []
    put = BulkCall.send_soon

    def noted(call: BulkCall, reply: FollowReply) -> bool:
        together.append(reply)
        return put(call, reply)

    monkeypatch.setattr(BulkCall, "send_soon", noted)
    with ParameterServers(2) as servers, worker_that_has_pushed(servers):
        assert {reply.WhichOneof("answer") for reply in together} == {"received"}
        wait_until_all_is_replicated(servers)


def wait_until_all_is_replicated(servers: ParameterServers, within_s: float = 20.0) -> None:
    give_up_s = time.monotonic() + within_s
    for server in servers.servers.values():
        for replica in server.catalog.shards():
            while replica.unreplicated_bytes:
                assert time.monotonic() < give_up_s
                time.sleep(0.001)


async def test_a_slot_is_reused_only_once_it_is_free() -> None:

    with mmap.mmap(-1, 2 * arena_slots.SLOT_BYTES) as mapped:
        own = arena_slots.ArenaSlots(mapped)
        first = await own.fill(memoryview(b"first"))
        second = await own.fill(memoryview(b"second"))
        waiting = asyncio.ensure_future(own.fill(memoryview(b"third")))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        assert (mapped[first : first + 5], mapped[second : second + 6]) == (b"first", b"second")
        own.free(second)
        assert await waiting == second
        assert mapped[second : second + 5] == b"third"
        del own


async def test_an_update_is_sent_at_once_while_a_slot_is_free() -> None:
    """The data of the update is in the slot, without a checksum, and not in the socket. The log
    refers to the slot until it is freed, and then has a copy of its own."""
    data = bytes(range(256)) * 64
    record = UpdateRecord(PushRecord(session="s", sequence=1, version=2), data)
    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, arena_slots.SLOT_BYTES) as mapped:
        ours.setblocking(False)
        theirs.setblocking(False)
        own = arena_slots.ArenaSlots(mapped)
        stream, other_end = BulkStream(FrameConnection(ours), "here", own), FrameConnection(theirs)
        messages = list(frames.of_record("j", 0, 1, record, stream.inline_bytes))
        log = ShardLog[OutgoingRecord](1)
        log.append(OutgoingRecord(record))
        (kept,) = log.records_after(1)
        keep = kept.set_lent_data
        assert stream.write_now(*messages, keep=keep)
        start, placed = await other_end.next_frame(), await other_end.next_frame()
        assert FollowRequest.FromString(bytes(start.body)).record.num_bytes == len(data)
        assert (placed.kind, placed.num_bytes, placed.checksum) == (FrameKind.PLACED, len(data), 0)
        assert mapped[placed.at : placed.at + len(data)] == data
        assert not stream.write_now(*messages, keep=keep)
        own.free(placed.at)
        mapped[placed.at : placed.at + len(data)] = bytes(len(data))
        assert kept.get().data == data
        assert stream.write_now(*messages, keep=keep)
        log.trim(2)
        gone, seen = ref(kept), kept.get().data
        del kept, keep, seen
        assert gone() is None
        own.free(placed.at)
        del own, stream
