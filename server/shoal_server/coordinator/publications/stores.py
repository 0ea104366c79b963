"""Parameter servers as stores of segments."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from shoal_proto.errors import ShoalError
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2_grpc import WeightStoreStub
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.core.publications.holders import HoldsAnswer, StoreServer
from shoal_server.core.publications.records import PublishedSegment
from shoal_server.etcd import keys
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.mirror import MirroredKey, PrefixMirror
from shoal_server.etcd.records import servers as registered
from shoal_server.etcd.records.servers import Server

log = structlog.get_logger(__name__)

ANSWER_S = 5.0


class Stores:
    """The registered servers, followed within `mirror`, and calls to them."""

    def __init__(
        self, store: LeaderStore, calls: ServerCalls, on_change: Callable[[], object]
    ) -> None:
        """`on_change` is called after each change of the servers' records."""
        self._calls = calls
        self._mirror: PrefixMirror[Server] = PrefixMirror(
            store, keys.SERVERS, _parsed, on_change=on_change, resync=True
        )

    @property
    def mirror(self) -> PrefixMirror[Server]:
        """Mirror of the servers' records. Enter it to follow them."""
        return self._mirror

    @property
    def present(self) -> list[StoreServer]:
        """The registered servers."""
        return [
            StoreServer(
                server_id=server.holder.server_id,
                incarnation=server.holder.incarnation,
                host=server.address.rpartition(":")[0],
                is_leaving=server.is_leaving,
            )
            for server in self._mirror.records.values()
        ]

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses by server id."""
        return {s.holder.server_id: s.address for s in self._mirror.records.values()}

    async def held_digests(
        self, series: str, segments: Sequence[PublishedSegment]
    ) -> dict[str, Collection[bytes]]:
        """Digests that each holder has; holders that do not answer are left out."""
        questions: dict[str, list[bytes]] = {}
        for segment in segments:
            for holder in segment.holders:
                questions.setdefault(holder, []).append(segment.digest)
        answers = await self.query_holders(series, questions)
        return {server.server_id: answer.held for server, _, answer in answers}

    async def query_holders(
        self, series: str, questions: Mapping[str, Sequence[bytes]]
    ) -> list[tuple[StoreServer, Sequence[bytes], HoldsAnswer]]:
        """Ask servers if they hold these digests. Returns the servers that answered, with their
        questions and answers."""
        present, addresses = {each.server_id: each for each in self.present}, self.addresses
        calls = [(present[each], digests) for each, digests in questions.items() if each in present]
        answers = await asyncio.gather(
            *(
                self._ask(
                    server,
                    pb.HoldsSegmentsRequest(series=series, digests=digests),
                    addresses[server.server_id],
                )
                for server, digests in calls
            )
        )
        return [
            (server, digests, answer)
            for (server, digests), answer in zip(calls, answers, strict=True)
            if answer is not None
        ]

    async def renew_all(self, series: str, epoch: int, publication: int) -> None:
        """Let all servers keep their segments of a publication for a further grace period."""
        request = pb.HoldsSegmentsRequest(series=series, epoch=epoch, publication=publication)
        addresses = self.addresses
        calls = [(each, addresses[each.server_id]) for each in self.present]
        await asyncio.gather(*(self._ask(server, request, address) for server, address in calls))

    async def _ask(
        self, server: StoreServer, request: pb.HoldsSegmentsRequest, address: str
    ) -> HoldsAnswer | None:
        try:
            reply: pb.HoldsSegmentsReply = await self._calls.call_on(
                WeightStoreStub,
                address,
                lambda stub: stub.Holds,
                request,
                ANSWER_S,
            )
        except ShoalError as error:
            log.warning("store_not_queried", server=server.server_id, reason=str(error))
            return None
        return HoldsAnswer(
            held=frozenset(reply.held),
            durable=frozenset(reply.durable),
            writes_to_disk=reply.writes_to_disk,
        )


def _parsed(item: MirroredKey) -> Server:
    return registered.parse(item.key, item.value)
