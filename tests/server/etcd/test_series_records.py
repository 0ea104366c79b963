"""Records of published series in etcd."""

import pytest

from shoal_proto.errors import InternalError
from shoal_server.core.publications.records import SeriesHead
from shoal_server.etcd.records import series


def test_a_head_of_a_later_format_is_refused_and_one_of_an_earlier_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes without a format are refused as well."""
    head = SeriesHead(number=3, kept=(2, 3), keep=2)
    with monkeypatch.context() as later:
        later.setattr(series, "FORMAT", series.FORMAT + 1)
        written = series.encode_head(head)
        assert series.parse_head("job/name", series.encode_head(head)) == head
    earlier = series.encode_head(head)
    for unreadable in (written, b""):
        with pytest.raises(InternalError, match="format"):
            series.parse_head("job/name", unreadable)
    monkeypatch.setattr(series, "FORMAT", series.FORMAT + 1)
    assert series.parse_head("job/name", earlier) == head
