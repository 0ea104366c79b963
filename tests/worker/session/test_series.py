"""`session.series` without a coordinator, and refusals of it and of the calls of plain scripts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.weights.memory_series import MemorySeries
from torch import nn

import shoal
from shoal.session import publishing
from shoal.session import session as session_module
from shoal.session.publishing import AWAY_S, SessionSeries
from shoal.weights.pieces import HeldWeights, replicated_weights
from shoal.weights.series import PublisherRank, SeriesOptions
from shoal_proto.errors import InvalidSpec, MemberDrained, PublicationAbandoned
from shoal_proto.v1.identity_pb2 import Token


def test_a_session_that_trains_alone_has_no_series() -> None:
    with (
        shoal.join("alone") as session,
        pytest.raises(InvalidSpec, match="a series needs a cluster"),
    ):
        session.series("policy")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keep": 0}, "keep is out of range"),
        ({"copies": 0}, "copies is out of range"),
        ({"dtype": torch.int8}, "cannot be published in this dtype"),
    ],
)
def test_invalid_options_are_refused_also_without_a_cluster(
    options: dict[str, object], reason: str
) -> None:
    with shoal.join("alone") as session, pytest.raises(InvalidSpec, match=reason):
        session.series("policy", **options)  # type: ignore[arg-type]


def test_a_session_has_one_series_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may ask for it at each publication; each series keeps memory until the end."""
    clustered: Any = Controller()
    monkeypatch.setattr(
        session_module, "SessionSeries", lambda alone, *args: SessionSeries(clustered, *args)
    )
    with shoal.join("alone") as session:
        policy = session.series("policy", keep=3)
        assert session.series("policy", keep=3) is policy
        assert session.series("other", keep=3) is not policy
        with pytest.raises(InvalidSpec, match="series policy was created with other options"):
            session.series("policy", keep=2)


def test_a_series_of_a_session_that_was_not_entered_is_refused() -> None:
    with pytest.raises(InvalidSpec):
        shoal.join("alone").series("policy")


@pytest.mark.parametrize("series", ["policy", "a/b/c", "/policy", "job/", "job/a b"])
def test_bad_names_of_series_are_refused(series: str) -> None:
    for call in (
        lambda: shoal.subscribe(series, coordinator="127.0.0.1:1"),
        lambda: shoal.publish(series, nn.Linear(1, 1), coordinator="127.0.0.1:1"),
    ):
        with pytest.raises(InvalidSpec, match="bad name of a series"):
            call()


def test_a_reader_without_a_coordinator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    with pytest.raises(InvalidSpec, match="no coordinator was named"):
        shoal.subscribe("job/policy")


def test_a_relay_with_tables_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpec, match="rows of tables are not relayed"):
        shoal.subscribe("job/policy", coordinator="127.0.0.1:1", tables=True, relay=True)


class Controller:
    """Controller of the first member of a generation, whose coordinator is away."""

    member = SimpleNamespace(coordinators=["127.0.0.1:1"], spec=SimpleNamespace(job="rl"))
    membership = SimpleNamespace(
        failure=None, is_broken=lambda generation: False, away_s=AWAY_S + 1.0
    )

    def __init__(self, world_size: int = 2) -> None:
        self.strategy = SimpleNamespace(synchronous=True, weights=self._weights)
        self._step, self._world_size = 0, world_size

    def present_or_next_generation(self, fields: dict[str, str]) -> Any:
        return SimpleNamespace(number=1, rank=0, world_size=self._world_size, token=Token(job="rl"))

    def _weights(self) -> HeldWeights:
        self._step += 1
        return replicated_weights(
            {"w": torch.ones(2)},
            {},
            step=self._step,
            rank=0,
            world_size=self._world_size,
            tied={},
        )


def test_a_member_trains_on_without_a_coordinator() -> None:
    """Two publications wait for a coordinator, in the background. A third one replaces them."""
    controller: Any = Controller()
    series = SessionSeries(controller, {}, "policy", SeriesOptions(), lambda call: None)
    tickets = [series.publish() for _ in range(3)]
    for ticket in tickets[:2]:
        with pytest.raises(PublicationAbandoned, match="without a coordinator"):
            ticket.wait("committed", 10)
    assert not tickets[2].is_over
    series.end(KeyboardInterrupt, KeyboardInterrupt(), None)
    with pytest.raises(PublicationAbandoned, match="or its session, ended"):
        tickets[2].wait("committed", 10)


def test_the_last_publication_of_a_drained_member_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The member is asked to leave while its part is sent, and leaves after its step."""
    memory, alone = MemorySeries(), PublisherRank(number=1, rank=0, world_size=1)
    memory.holds.clear()

    class DrainedMembership:
        away_s, num_looks = 0.0, 0

        def is_broken(self, generation: int) -> bool:
            return False

        @property
        def failure(self) -> MemberDrained:
            self.num_looks += 1
            if self.num_looks == 2:
                memory.holds.set()
            return MemberDrained("a leaves job rl", seen="SIGTERM")

    monkeypatch.setattr(publishing, "SeriesPublisher", lambda *_, **__: memory.connect(alone))
    controller: Any = Controller(world_size=1)
    controller.membership = DrainedMembership()
    series = SessionSeries(controller, {}, "policy", SeriesOptions(), lambda call: None)
    ticket = series.publish()
    series.end(None, None, None)
    version = ticket.wait("committed", 0)
    assert version is not None and version.number == 1
