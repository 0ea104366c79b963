"""Which of the servers that etcd lists are there: a lease outlives its server by seconds."""

import asyncio
from collections.abc import Mapping

import grpc
import grpc.aio
import structlog

from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_server.core.holdings import Holder
from shoal_server.rpc import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)

ANSWER_S = 1.0
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


async def answering(addresses: Mapping[Holder, str]) -> dict[Holder, str]:
    """Those that answer as the process that is listed, with their addresses. Takes a second if one
    hangs."""
    answers = await asyncio.gather(*(_answers(h, a) for h, a in addresses.items()))
    silent = [h.server_id for h, there in zip(addresses, answers, strict=True) if not there]
    if silent:
        log.warning("servers_do_not_answer", servers=sorted(silent))
    return {h: a for (h, a), there in zip(addresses.items(), answers, strict=True) if there}


async def _answers(holder: Holder, address: str) -> bool:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            found = await ReplicationStub(channel).Identify(pb.IdentifyRequest(), timeout=ANSWER_S)
        except grpc.RpcError:
            return False
    return Holder(found.server_id, found.incarnation) == holder


__all__ = ["answering"]
