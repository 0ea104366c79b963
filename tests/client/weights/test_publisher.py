"""Publisher of a script's series, without a coordinator."""

import threading
from typing import Any

import pytest

from shoal_client.connection.coordinators import Coordinators
from shoal_client.weights.publisher import SeriesPublisher
from shoal_proto.v1 import weights_pb2 as pb


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
