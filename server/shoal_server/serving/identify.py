"""Check, by a call, if a parameter server is alive: its lease in etcd outlives the server by
seconds."""

from collections.abc import Sequence

import grpc
import grpc.aio

from shoal_proto.tls.channels import open_aio_channel
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_server.core.processes import Holder


async def answers(
    holder: Holder, address: str, *, options: Sequence[tuple[str, int | str]], within_s: float
) -> bool:
    """True if the process `holder` answers at the address within `within_s`."""
    async with open_aio_channel(address, SERVER_NAME, options) as channel:
        try:
            found = await ReplicationStub(channel).Identify(pb.IdentifyRequest(), timeout=within_s)
        except grpc.RpcError:
            return False
    return Holder(found.server_id, found.incarnation) == holder
