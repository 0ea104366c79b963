"""Sets the new field of the next release: in each request, each answer and each stored record.

Python imports it at its start in every process that has the next release on its path.
"""

import json
from collections.abc import Callable
from typing import Any

import grpc._channel
import grpc.aio._channel

from shoal_proto.v1 import identity_pb2
from shoal_server.coordinator.persistence import codec
from shoal_server.etcd.remote import wire
from shoal_server.serving import rpc

NEW_FIELD = identity_pb2.Token(of_the_next_release="next").SerializeToString()  # type: ignore[call-arg]
"""The field as encoded in every message: it has the same number in all of them."""
ROOT = b"/shoal/v1/"
ASSIGNMENTS = ROOT + b"assignments/"
MARK = {"of_the_next_release": {"says": ["more"]}}


def extended(key: bytes, value: bytes) -> bytes:
    """The value as the next release writes it."""
    if key.startswith(ROOT) and value.startswith(b"{"):
        return json.dumps({**json.loads(value), **MARK}).encode()
    return value + NEW_FIELD if key.startswith(ASSIGNMENTS) else value


plain_request = wire.transaction_request


def transaction_request(*arguments: Any) -> Any:
    request = plain_request(*arguments)
    for operation in (*request.success, *request.failure):
        if operation.HasField("request_put"):
            put = operation.request_put
            put.value = extended(put.key, put.value)
    return request


plain_roster = codec._roster_to_pb


def roster_to_pb(roster: Any) -> Any:
    """Add the new field to a roster. The digest covers it, and members of both releases compute
    that digest."""
    message = plain_roster(roster)
    for part in (message, *message.entries):
        part.of_the_next_release = "next"
    return message


plain_encoded = rpc._encoded


def encoded(serialize: Any, reply: Any) -> bytes:
    return plain_encoded(serialize, reply) + NEW_FIELD


def extending(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the channel, so that its requests have the new field."""

    def made(self: Any, name: Any, request_serializer: Any = None, *rest: Any, **named: Any) -> Any:
        serialize = request_serializer
        if serialize is not None and "/shoal.v1." in str(name):

            def request_serializer(message: Any) -> bytes:
                return bytes(serialize(message)) + NEW_FIELD

        return plain(self, name, request_serializer, *rest, **named)

    return made


wire.transaction_request = transaction_request
rpc._encoded = encoded
codec._roster_to_pb = roster_to_pb
for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
    for channel in (grpc._channel.Channel, grpc.aio._channel.Channel):
        setattr(channel, kind, extending(getattr(channel, kind)))
