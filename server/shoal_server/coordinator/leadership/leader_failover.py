"""Ends the term of a leader whose process is gone, without waiting for its lease.

A lease must outlast slow disks, busy machines and elections within etcd. But the connections of a
dead process are closed, and new ones refused, at once. So each other coordinator keeps a call to
the leader open. If the call breaks, and a new connection is then *refused*, the leader is gone. In
all other cases the lease has to expire.

A refusal counts only if the leader has answered this coordinator before: two coordinators behind
firewalls that refuse could otherwise end each other's terms again and again. Safety does not depend
on this check: see `end_term`.
"""

import asyncio
import socket

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal_proto.addresses import split_address
from shoal_proto.back_off import BackOff
from shoal_proto.errors import ShoalError
from shoal_proto.tls.channels import open_aio_channel
from shoal_proto.tls.names import COORDINATOR_NAME
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.leader_key import Leader, end_term

log = structlog.get_logger(__name__)

FIRST_BACK_OFF_S = 0.02
MAX_BACK_OFF_S = 1.0
CONNECT_WITHIN_S = 1.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (("grpc.use_local_subchannel_pool", 1),)


async def end_term_when_gone(store: KeyValueStore, leader: Leader) -> None:
    """End the leader's term as soon as its process is gone. Retries while etcd does not answer;
    logs `term_not_ended` if etcd refuses. Cancel this when the leader changes."""
    known = False
    pauses = BackOff(FIRST_BACK_OFF_S, MAX_BACK_OFF_S)
    while True:
        if await answered_until_broken(leader.address):
            known = True
            pauses.reset()
        if known and await refuses(leader.address):
            log.warning(
                "leader_process_ended", leader=leader.address, reason="it refuses connections"
            )
            break
        await asyncio.sleep(pauses.pause_s())
    try:
        await end_term(store, leader)
    except ShoalError as error:
        log.error("term_not_ended", leader=leader.address, reason=str(error))


async def answered_until_broken(address: str) -> bool:
    """Keep a call to the coordinator open until it breaks. True if the coordinator answered."""
    answered = False
    async with open_aio_channel(address, COORDINATOR_NAME, CHANNEL_OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            async for _ in health_pb2_grpc.HealthStub(channel).Watch(request):
                answered = True
        except grpc.aio.AioRpcError as error:
            log.debug("leader_call_failed", leader=address, reason=error.details())
    return answered


async def refuses(address: str) -> bool:
    """True if every address of host:port refuses a connection; a timeout is not a refusal."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_WITHIN_S):
            targets = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for *_, target in targets:
                try:
                    _, writer = await asyncio.open_connection(str(target[0]), port)
                except ConnectionRefusedError:
                    continue
                writer.close()
                return False
    except OSError as error:  # includes TimeoutError
        log.debug("leader_does_not_answer", leader=address, reason=repr(error))
        return False
    return bool(targets)
