"""A committed version, as publishers and readers see it."""

import time
from collections.abc import Mapping
from functools import cached_property

from shoal_proto.v1 import weights_pb2


class WeightVersion:
    """A committed version of a series. Immutable; equal to another if number and digest are."""

    def __init__(self, record: weights_pb2.VersionRecord) -> None:
        self.record = record

    @property
    def number(self) -> int:
        """Number in the series, counted from 1."""
        return self.record.number

    @property
    def step(self) -> int:
        """Number of steps committed before the publication; for a script, its own number."""
        return self.record.step

    @property
    def digest(self) -> str:
        """Digest of all bytes and their layout, in hexadecimal."""
        return self.record.digest.hex()

    @property
    def epoch(self) -> int:
        """Epoch of the series: rises with each change of its publisher."""
        return self.record.epoch

    @property
    def created_unix_s(self) -> float:
        return self.record.created_unix_s

    @property
    def age_s(self) -> float:
        """Seconds since the version was committed, by this host's clock."""
        return time.time() - self.record.created_unix_s

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.record.segments)

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        return dict(self.record.metadata)

    @property
    def is_durable(self) -> bool:
        """True if the version was on its servers' disks when this record was read."""
        return self.record.durable

    @property
    def rolled_back_to(self) -> int | None:
        """Number of the version that this one is a rollback to; else None."""
        return self.record.rolled_back_to or None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightVersion):
            return NotImplemented
        return (self.number, self.digest) == (other.number, other.digest)

    def __hash__(self) -> int:
        return hash((self.number, self.digest))

    def __repr__(self) -> str:
        return f"WeightVersion({self.number}, step={self.step}, digest={self.digest[:12]})"
