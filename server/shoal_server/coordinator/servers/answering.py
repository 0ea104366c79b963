"""Check which registered servers are alive."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from shoal_proto.errors import NoServers
from shoal_server.core.processes import Holder
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import shard_map
from shoal_server.serving.identify import answers
from shoal_server.serving.rpc import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)

Choose = Callable[[Mapping[Holder, str]], Awaitable[Mapping[Holder, str]]]
"""Selects servers that may be given shards."""

ANSWER_S = 1.0
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


async def answering(addresses: Mapping[Holder, str]) -> dict[Holder, str]:
    """Return the servers that answer as the registered process. Takes ANSWER_S if a server
    hangs."""
    calls = (answers(h, a, options=_OPTIONS, within_s=ANSWER_S) for h, a in addresses.items())
    has_answered = dict(zip(addresses, await asyncio.gather(*calls), strict=True))
    silent = sorted(holder.server_id for holder, answered in has_answered.items() if not answered)
    if silent:
        log.warning("servers_do_not_answer", servers=silent)
    return {holder: address for holder, address in addresses.items() if has_answered[holder]}


async def servers_for(store: LeaderStore, choose: Choose, job: str) -> Mapping[Holder, str]:
    """Return the servers for a job's new shards, with their addresses. `choose` leaves out dead
    servers that are still registered. Raises NoServers, and what the store raises."""
    listed = await shard_map.servers_for_shards(store)
    present = await choose(listed)
    if not present:
        raise NoServers(
            f"there is no parameter server for job {job}",
            seen=f"none of {len(listed)} registered answers" if listed else "none registered",
            expected="one or more",
            fix="Start one with `shoal ps`.",
        )
    return present
