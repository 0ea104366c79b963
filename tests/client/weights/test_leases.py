"""Leases of a reader, without a coordinator."""

from typing import Any

import pytest

from shoal_client.connection.coordinators import Coordinators
from shoal_client.weights import leases
from shoal_client.weights.leases import ReaderLeases
from shoal_proto.errors import DeadlineExceeded, NotLeader, Overloaded, ShoalError, Unavailable
from shoal_proto.v1.weights_pb2 import ReaderReportReply


def leases_after(error: ShoalError, monkeypatch: pytest.MonkeyPatch) -> ReaderLeases:
    """Return leases whose first report ends with the error, and the next with a reply."""
    errors = iter([error])

    def answer(coordinators: object, method: object, request: Any, **limits: Any) -> Any:
        for each in errors:
            raise each
        number = list(request.leased)
        return ReaderReportReply(lease_s=30.0, leased=number, relays=["" for _ in number])

    monkeypatch.setattr(leases, "ATTEMPT_S", 0.1)
    monkeypatch.setattr(Coordinators, "call", answer)
    return ReaderLeases(Coordinators(["127.0.0.1:1"]), "job/name", "reader")


@pytest.mark.parametrize("kind", [NotLeader, Unavailable, DeadlineExceeded])
def test_a_lease_waits_for_a_coordinator(
    kind: type[ShoalError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator without etcd, and one that starts, answer that they do not lead."""
    found = leases_after(kind("no coordinator leads"), monkeypatch)
    try:
        found.take(1, timeout_s=30.0)
    finally:
        found.close()


def test_a_lease_does_not_wait_for_other_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The series has its maximum of readers."""
    found = leases_after(Overloaded("too many readers"), monkeypatch)
    try:
        with pytest.raises(Overloaded):
            found.take(1, timeout_s=30.0)
    finally:
        found.close()
