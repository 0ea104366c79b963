"""Refusals of `session.series` and of the calls of plain scripts, before anything is sent."""

import pytest
import torch
from torch import nn

import shoal
from shoal_proto.errors import InvalidSpec


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
