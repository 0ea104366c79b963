"""Publisher of a script's series, without a coordinator."""

import threading
from typing import Any

import pytest
from support.weights.segments import segment_of

from shoal_client.connection.coordinators import Coordinators
from shoal_client.weights.publisher import TIMEOUT_S, SeriesPublisher
from shoal_client.weights.stores import WeightStores
from shoal_proto.errors import DeadlineExceeded
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.coordinator.snapshots.taking import PUBLISH_WITHIN_S


def test_a_series_is_published_and_released_without_a_thread_that_renews_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 starts no thread once the script has ended, and publications end later."""
    requests = []

    def answer(coordinators: object, method: object, request: Any, **limits: Any) -> Any:
        requests.append(request)
        return pb.BeginPublicationReply(epoch=1, lease_s=30.0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(Coordinators, "call", answer)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    publisher = SeriesPublisher(["127.0.0.1:1"], "job/name", lambda: pb.Publisher(incarnation="i"))
    assert publisher.begin().epoch == 1
    publisher.close()
    assert [request.ending for request in requests] == [False, True]


def test_servers_have_all_the_time_of_a_part_to_copy_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cut that is ended earlier copies every table again, and takes as long again."""
    limits_s = []

    def answer(coordinators: object, method: object, request: Any, **limits: Any) -> Any:
        if isinstance(request, pb.BeginPublicationRequest):
            return pb.BeginPublicationReply(epoch=1, servers=[pb.StoreServer(id="s1")])
        limits_s.append(limits["timeout_s"])
        raise DeadlineExceeded("the tables were not copied in time")

    def put(stores: object, to: object, *put: object) -> pb.PutSegmentReply:
        publisher.close()  # no further attempt
        return pb.PutSegmentReply(holders=["s1"])

    monkeypatch.setattr(Coordinators, "call", answer)
    monkeypatch.setattr(WeightStores, "put", put)
    publisher = SeriesPublisher(["127.0.0.1:1"], "job/name", lambda: pb.Publisher(incarnation="i"))
    segment = segment_of(bytes(4))
    layout = pb.Layout(segment_bytes=[4])
    with pytest.raises(DeadlineExceeded):
        publisher.contribute(segment, layout, publication=1, tied={})
    assert limits_s == [pytest.approx(TIMEOUT_S, abs=10.0)]
    assert PUBLISH_WITHIN_S >= TIMEOUT_S
