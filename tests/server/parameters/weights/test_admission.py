"""Segments that a server admits while its watch of the records lags."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clusters.memory_store import MemoryStore
from support.weights.segments import segment_of

from shoal_proto.errors import StaleEpoch
from shoal_proto.tls.bulk_offers import PermittedUse, Purpose
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.core.publications.records import SeriesHead
from shoal_server.etcd import keys
from shoal_server.etcd.records.series import encode_head
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.records import SeriesRecords
from shoal_server.parameters.weights.servicer import WeightsServicer

SERIES = "job/policy"


async def test_a_job_that_was_removed_and_run_again_publishes_under_its_first_epoch() -> None:
    unused = cast("Any", SimpleNamespace(follow=lambda *_: None))
    store = MemoryStore()
    memory = Memory(1000, Catalog(store, Holder("ps-0", "one")), Budget(1000))
    with ThreadPoolExecutor(1) as threads, closing(segment_of(b"weights")) as segment:
        holdings = WeightHoldings(memory, threads, unused)
        servicer = WeightsServicer(
            "ps-0",
            records=SeriesRecords(store, holdings, unused),
            holdings=holdings,
            differences=unused,
            upkeep=unused,
            peers=unused,
            offers=unused,
        )
        holdings.follow(SERIES, (5, 1), {})
        request = pb.PutSegmentRequest(
            series=SERIES,
            epoch=1,
            publication=1,
            segment=pb.Segment(digest=segment.digest, num_bytes=segment.num_bytes),
        )

        async def first_reply() -> pb.PutSegmentReply:
            use = PermittedUse(Purpose.SEGMENTS, None, SERIES)
            replies = servicer.put(request, use, cast("Any", SimpleNamespace(is_local=True)))
            (reply,) = await anext(replies)
            await replies.aclose()
            return cast("pb.PutSegmentReply", reply)

        with pytest.raises(StaleEpoch, match="expected epoch 5"):
            await first_reply()
        await store.put(keys.series_head(SERIES), encode_head(SeriesHead(epoch=1)))
        assert (await first_reply()).transfer == pb.SEGMENT_TRANSFER_DESCRIPTOR
