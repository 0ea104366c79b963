"""Interface for receiving and sending a segment in one call of a bulk connection."""

from collections.abc import AsyncGenerator
from typing import Protocol

from shoal_proto.segments.sealed import Segment, SegmentWriter


class SegmentTransport(Protocol):
    """A call of a bulk connection, as the server sees it."""

    @property
    def is_local(self) -> bool:
        """True if descriptors can be passed."""
        ...

    async def receive_descriptor(self) -> int:
        """Receive a descriptor, which the caller must close. Raises MalformedMessage,
        ChecksumMismatch or PeerHungUp."""
        ...

    def receive_chunks(self, writer: SegmentWriter) -> AsyncGenerator[memoryview, None]:
        """Receive chunks, in order, into the writer's memory, and yield the part that each fills.
        Raises MalformedMessage, ChecksumMismatch or PeerHungUp."""
        ...

    def end(self) -> None:
        """Stop sending. A send in progress fails."""
        ...

    async def send_descriptor(self, segment: Segment) -> None:
        """Send a segment's descriptor. Raises PeerHungUp."""
        ...

    async def send_chunk(self, index: int, segment: Segment) -> None:
        """Send one chunk of a segment. Raises PeerHungUp."""
        ...
