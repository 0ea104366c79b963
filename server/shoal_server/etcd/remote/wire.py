"""Conversion between the types of `api` and etcd's messages."""

from collections.abc import Iterable, Sequence

from shoal_proto.errors import InvalidSpec
from shoal_proto.etcd import etcd_pb2 as pb
from shoal_server.etcd.api import (
    Compare,
    Delete,
    EventKind,
    Get,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TransactionResult,
    WatchEvent,
)


def prefix_end(prefix: str) -> bytes:
    """The first key beyond the prefix; b"\\0" stands for "no end"."""
    end = prefix.encode().rstrip(b"\xff")
    return end[:-1] + bytes([end[-1] + 1]) if end else b"\0"


def key_range(key: str, *, prefix: bool) -> tuple[bytes, bytes]:
    if not prefix:
        if not key:
            raise InvalidSpec("an empty key", expected="a key of at least one character")
        return key.encode(), b""
    return key.encode() or b"\0", prefix_end(key)


def range_request(key: str, *, prefix: bool) -> pb.RangeRequest:
    start, end = key_range(key, prefix=prefix)
    return pb.RangeRequest(key=start, range_end=end)


def keys_request(prefix: str, *, after: bytes, limit: int) -> pb.RangeRequest:
    """Request for a page of keys: those after `after` (empty: the first page)."""
    start, end = key_range(prefix, prefix=True)
    if after:
        start = after + b"\x00"
    return pb.RangeRequest(key=start, range_end=end, limit=limit, keys_only=True)


def key_text(key: bytes) -> str:
    """A key as text. Bytes that are not UTF-8, as in keys of other programs, are escaped."""
    return key.decode(errors="backslashreplace")


def delete_request(key: str, *, prefix: bool) -> pb.DeleteRangeRequest:
    start, end = key_range(key, prefix=prefix)
    return pb.DeleteRangeRequest(key=start, range_end=end)


def transaction_request(
    compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]
) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[_compare(each) for each in compares],
        success=[_operation(each) for each in then],
        failure=[_operation(each) for each in otherwise],
    )


def _compare(compare: Compare) -> pb.Compare:
    key, expected = compare.key.encode(), compare.expected
    if compare.prefix and compare.field == "mod_revision":
        assert isinstance(expected, int)
        start, end = key_range(compare.key, prefix=True)
        return pb.Compare(
            result=pb.Compare.LESS,
            target=pb.Compare.MOD,
            key=start,
            range_end=end,
            mod_revision=expected + 1,
        )
    if compare.field == "value":
        assert isinstance(expected, bytes)
        return pb.Compare(target=pb.Compare.VALUE, key=key, value=expected)
    assert isinstance(expected, int)
    if compare.field == "mod_revision":
        return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=expected)
    if compare.field == "create_revision":
        return pb.Compare(target=pb.Compare.CREATE, key=key, create_revision=expected)
    raise InvalidSpec(
        "a transaction compares an unknown field",
        seen=compare.field,
        expected="value, mod_revision or create_revision",
    )


def _operation(operation: Operation) -> pb.RequestOp:
    match operation:
        case Put(key=key, value=value, lease=lease):
            put = pb.PutRequest(key=key.encode(), value=value, lease=lease)
            return pb.RequestOp(request_put=put)
        case Delete(key=key, prefix=prefix):
            return pb.RequestOp(request_delete_range=delete_request(key, prefix=prefix))
        case Get(key=key, prefix=prefix):
            return pb.RequestOp(request_range=range_request(key, prefix=prefix))


def key_value(message: pb.KeyValue) -> KeyValue:
    return KeyValue(
        key=key_text(message.key),
        value=message.value,
        create_revision=Revision(message.create_revision),
        mod_revision=Revision(message.mod_revision),
        version=message.version,
        lease=LeaseId(message.lease),
    )


def key_values(messages: Iterable[pb.KeyValue]) -> tuple[KeyValue, ...]:
    return tuple(key_value(each) for each in messages)


def transaction_result(reply: pb.TxnResponse) -> TransactionResult:
    """The outcome, with the results of the reads, in order."""
    reads = tuple(
        key_values(each.response_range.kvs)
        for each in reply.responses
        if each.WhichOneof("response") == "response_range"
    )
    return TransactionResult(reply.succeeded, Revision(reply.header.revision), reads)


def watch_event(message: pb.Event) -> WatchEvent:
    return WatchEvent(
        kind=EventKind.DELETE if message.type == pb.Event.DELETE else EventKind.PUT,
        key=key_text(message.kv.key),
        value=message.kv.value,
        mod_revision=Revision(message.kv.mod_revision),
    )
