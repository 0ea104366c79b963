"""Calls from the coordinator to parameter servers."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from shoal_proto.status import from_rpc_error
from shoal_proto.tls.channels import material, open_aio_channel
from shoal_proto.tls.files import TlsMaterial
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.v1.snapshots_pb2_grpc import ShardSnapshotsStub
from shoal_server.serving.rpc import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from shoal_proto.v1.snapshots_pb2_grpc import ShardSnapshotsAsyncStub

Reply = TypeVar("Reply")
MAX_CHANNELS = 256


class ServerCalls:
    """Calls over one connection to each server, on one event loop. Beyond MAX_CHANNELS, the oldest
    connection is closed, and its calls fail."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, TlsMaterial | None], grpc.aio.Channel] = {}

    async def call(
        self,
        address: str,
        method: "Callable[[ShardSnapshotsAsyncStub], Callable[..., Awaitable[Reply]]]",
        request: Any,
        timeout_s: float,
    ) -> Reply:
        """Call a server's ShardSnapshots service. Raises the error of the server or connection."""
        # The stub's type for grpc.aio has another name.
        stub: Any = ShardSnapshotsStub
        return await self.call_on(stub, address, method, request, timeout_s)

    async def call_on(
        self,
        service: Callable[[grpc.aio.Channel], Any],
        address: str,
        method: Callable[[Any], Callable[..., Awaitable[Reply]]],
        request: Any,
        timeout_s: float,
    ) -> Reply:
        """Call the service of the given stub, as `call` does."""
        # After a renewal of the certificate, calls in progress stay on the old connection.
        key = address, material()
        channel = self._channels.get(key)
        if channel is None:
            await self._close_oldest()
            channel = open_aio_channel(address, SERVER_NAME, CHANNEL_OPTIONS)
            self._channels[key] = channel
        try:
            return await method(service(channel))(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, address) from None

    async def _close_oldest(self) -> None:
        while len(self._channels) >= MAX_CHANNELS:
            await self._channels.pop(next(iter(self._channels))).close()

    async def close(self) -> None:
        """Close every connection."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
