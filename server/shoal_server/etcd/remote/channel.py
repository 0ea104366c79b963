"""The gRPC channel to an etcd endpoint, and how a dead peer is noticed.

A peer that acknowledges no TCP data is noticed by TCP_USER_TIMEOUT, which gRPC sets to the
keepalive timeout. A hanging process (SIGSTOP) is noticed by HTTP/2 pings, by the time limit of an
attempt, and by a watch's progress requests. etcd allows one ping in 5 s and none on an idle
connection; otherwise it closes the connection (GOAWAY).
"""

import grpc
import grpc.aio

from shoal_proto.etcd import etcd_pb2_grpc as stubs
from shoal_proto.tls.channels import direct_aio_channel

MAX_ANSWER_BYTES = 256 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Otherwise the pings of a silent watch would stop after two.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # gRPC also uses this as the time limit for a connection.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


class EtcdConnection:
    """Channel and stubs of one endpoint, which connect by themselves, and again after a break."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.credentials = credentials
        self.channel = direct_aio_channel(address, credentials, CHANNEL_OPTIONS)
        self.kv = stubs.KVStub(self.channel)
        self.watch = stubs.WatchStub(self.channel)
        self.lease = stubs.LeaseStub(self.channel)
        self.auth = stubs.AuthStub(self.channel)
        self.closed = False

    async def close(self) -> None:
        """Close the channel. Calls in progress raise CancelledError; see
        `Connections.cancel_as_failure`."""
        self.closed = True
        await self.channel.close()

    @property
    def is_connected(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY
