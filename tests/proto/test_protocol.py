"""Two processes use the newest protocol that both know; an error names the older process."""

import pytest

from shoal_proto.errors import ProtocolMismatch
from shoal_proto.protocol import (
    OWN_PROTOCOLS,
    USER_AGENT_OPTION,
    ProtocolRange,
    announced,
    user_agent,
)


@pytest.mark.parametrize(
    ("server", "caller", "spoken"),
    [
        ((3, 3), (3, 3), 3),
        ((3, 4), (3, 3), 3),
        ((3, 3), (3, 4), 3),
        ((3, 5), (4, 7), 5),
        ((4, 4), (3, 3), None),
        ((3, 3), (4, 5), None),
    ],
)
def test_the_newest_common_version_is_used(
    server: tuple[int, int], caller: tuple[int, int], spoken: int | None
) -> None:
    assert ProtocolRange(*server).shared_with(ProtocolRange(*caller)) == spoken
    assert ProtocolRange(*caller).shared_with(ProtocolRange(*server)) == spoken


def test_a_mismatch_names_the_older_process() -> None:
    with pytest.raises(ProtocolMismatch, match="Upgrade the caller") as raised:
        ProtocolRange(4, 5).negotiate(ProtocolRange(2, 3))
    assert raised.value.seen == "versions 2-3"
    with pytest.raises(ProtocolMismatch, match="Upgrade the server"):
        ProtocolRange(2, 3).negotiate(ProtocolRange(4, 5))


def test_the_range_travels_in_the_user_agent() -> None:
    agent = f"{USER_AGENT_OPTION[1]} grpc-python/1.70.0 grpc-c/45.0.0 (linux; chttp2)"
    assert announced(agent) == OWN_PROTOCOLS
    assert announced(user_agent(ProtocolRange(12, 345))) == ProtocolRange(12, 345)


@pytest.mark.parametrize(
    "agent", ["", "grpc-python/1.70.0", "shoal-protocol/3", "shoal-protocol/-"]
)
def test_a_user_agent_without_a_range_has_none(agent: str) -> None:
    assert announced(agent) is None
