"""Segments of published weights with given contents."""

from shoal_proto.segments.sealed import Segment, SegmentWriter


def segment_of(data: bytes) -> Segment:
    writer = SegmentWriter(len(data))
    writer.buffer[:] = data
    return writer.seal()
