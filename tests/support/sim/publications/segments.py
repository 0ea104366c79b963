"""Segments, as bytes under their digest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SimSegment:
    digest: bytes
    data: bytes
