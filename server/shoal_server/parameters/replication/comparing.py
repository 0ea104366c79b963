"""Continuous comparison of this server's primaries with their backups."""

import asyncio
from collections.abc import Iterator

import structlog

from shoal_proto.errors import ShoalError
from shoal_server.parameters.comparison.digest import PieceWalk
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.replication.throttle import LARGE
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.workers import Runner

log = structlog.get_logger(__name__)

COMPARE_EACH_S = 0.25
"""Interval between pieces of 1 MiB. All shards take turns: at most 14.1 GiB an hour."""


class Comparing:
    """Sends digests of pieces to backups, which compare them with their own."""

    def __init__(self, catalog: Catalog, links: OutgoingLinks, run: Runner) -> None:
        self._catalog = catalog
        self._links = links
        self._run = run
        self._walks: dict[ShardReplica, PieceWalk] = {}

    async def run_for_ever(self) -> None:
        while True:
            replicas = list(self._led())
            self._walks = {each: self._walks.get(each, PieceWalk()) for each in replicas}
            for replica in replicas:
                await asyncio.sleep(COMPARE_EACH_S)
                try:
                    await self._send_digest(replica)
                except ShoalError as error:
                    log.warning(
                        "copies_not_compared",
                        job=replica.job,
                        shard_id=replica.shard_id,
                        reason=str(error),
                    )
                except Exception:
                    # Not raised: the round would start again, and later shards would never be
                    # compared.
                    log.exception("copies_not_compared", job=replica.job, shard_id=replica.shard_id)
            if not replicas:
                await asyncio.sleep(COMPARE_EACH_S)

    def _led(self) -> Iterator[ShardReplica]:
        for replica in self._catalog.shards():
            if replica.role is ReplicaRole.PRIMARY and not replica.is_forming:
                yield replica

    async def _send_digest(self, replica: ShardReplica) -> None:
        if not replica.is_followed:
            return
        walk = self._walks[replica]
        digest = await replica.run_in_order(self._run, LARGE, lambda: walk.next(replica.state))
        self._links.compare(replica, digest)
