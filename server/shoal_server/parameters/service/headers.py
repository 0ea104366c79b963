"""The error for a bad first message of a stream, for all services."""

from shoal_proto.errors import MalformedMessage


def no_header(expected: str) -> MalformedMessage:
    """Return the error for a stream that begins with another message, or has no message."""
    return MalformedMessage(
        "the stream does not begin with its header",
        seen="another message, or none",
        expected=f"a {expected}",
    )
