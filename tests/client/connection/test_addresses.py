"""Addresses of coordinators, as a user writes them."""

import pytest

from shoal_client.connection.addresses import parse_coordinators
from shoal_proto.errors import InvalidSpec


def test_several_addresses_are_separated_by_commas() -> None:
    """A host may be an IPv6 address in brackets."""
    assert parse_coordinators("a:7700, [::1]:1") == ("a:7700", "[::1]:1")


@pytest.mark.parametrize("text", ["host", ":7700", "host:", "host:0", "host:65536", "host:\u00b2"])
def test_another_text_is_refused(text: str) -> None:
    """U+00B2 is a digit to Python, and no number."""
    with pytest.raises(InvalidSpec, match="bad coordinator address"):
        parse_coordinators(text)
