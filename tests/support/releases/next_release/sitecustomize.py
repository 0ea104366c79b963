"""Turns the code of now into that of a release after it, in every Python that has this directory on
its path.

It speaks one version of the protocol more, and says more than this release knows: in every JSON
object and every message that it writes into etcd, in every request and in every answer.
"""

import json
from collections.abc import Callable
from typing import Any

import grpc._channel
import grpc.aio._channel

from shoal_proto import protocol

NOW = protocol.OWN_PROTOCOLS
protocol.OWN_PROTOCOLS = protocol.ProtocolRange(NOW.oldest, NOW.newest + 1)
protocol.USER_AGENT_OPTION = (
    "grpc.primary_user_agent",
    protocol.user_agent(protocol.OWN_PROTOCOLS),
)
# They take the range over as they are imported.
from shoal_server.etcd.remote import wire  # noqa: E402
from shoal_server.serving import rpc  # noqa: E402

UNKNOWN_FIELD = bytes.fromhex("82f403") + b"\x04next"
"""Field 8000 of a protobuf message, a string."""
ROOT = b"/shoal/v1/"
ASSIGNMENTS = ROOT + b"assignments/"
MARK = {"of_the_next_release": {"says": ["more"]}}


def said_more(key: bytes, value: bytes) -> bytes:
    """The value as the next release would write it."""
    if key.startswith(ROOT) and value.startswith(b"{"):
        return json.dumps({**json.loads(value), **MARK}).encode()
    return value + UNKNOWN_FIELD if key.startswith(ASSIGNMENTS) else value


plain_request = wire.transaction_request


def transaction_request(*arguments: Any) -> Any:
    request = plain_request(*arguments)
    for operation in (*request.success, *request.failure):
        if operation.HasField("request_put"):
            put = operation.request_put
            put.value = said_more(put.key, put.value)
    return request


plain_encoded = rpc._encoded


def encoded(serialize: Any, reply: Any) -> bytes:
    return plain_encoded(serialize, reply) + UNKNOWN_FIELD


def saying_more(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A channel's way to make a method, whose requests then say more."""

    def made(self: Any, name: Any, request_serializer: Any = None, *rest: Any, **named: Any) -> Any:
        serialize = request_serializer
        if serialize is not None and "/shoal.v1." in str(name):

            def request_serializer(message: Any) -> bytes:
                return bytes(serialize(message)) + UNKNOWN_FIELD

        return plain(self, name, request_serializer, *rest, **named)

    return made


wire.transaction_request = transaction_request
rpc._encoded = encoded
for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
    for channel in (grpc._channel.Channel, grpc.aio._channel.Channel):
        setattr(channel, kind, saying_more(getattr(channel, kind)))
