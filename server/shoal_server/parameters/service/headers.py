"""What is wrong with the first message of a stream, whichever service it comes to."""

from shoal_proto.errors import MalformedMessage


def no_header(expected: str) -> MalformedMessage:
    """The error for a stream that begins with something else, or ends before it has begun."""
    return MalformedMessage(
        "the stream does not begin with its header",
        seen="another message, or none",
        expected=f"a {expected}",
    )
