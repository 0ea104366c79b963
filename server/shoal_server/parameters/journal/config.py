"""Configuration of a journal: its directory and bounds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.serving.options import INTERNAL

START_BYTES = 16
"""Size of a segment's start, before its first entry."""


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    directory: Annotated[Path, Parameter(name="--journal", metavar="DIRECTORY")]
    """Also keep applied pushes in this directory, on a disk that honours `fsync`: needed for
    durable acknowledgement, and to continue after all servers died at once. Each server needs a
    directory of its own."""
    segment_bytes: Annotated[int, INTERNAL] = 64 * 1024**2
    """Size at which a new segment is started."""
    max_pending_bytes: Annotated[int, INTERNAL] = 64 * 1024**2
    """Maximum bytes of records that wait for the disk; above this, `Journal.check_capacity` raises.
    """
    max_bytes: Annotated[int, INTERNAL] = 4 * 1024**3
    """Maximum bytes of all segments; above this, `Journal.check_capacity` raises. Above half of it,
    `Journal.overdue` names the shards whose images would free the oldest segment."""

    def __post_init__(self) -> None:
        if not START_BYTES < self.segment_bytes <= self.max_bytes or self.max_pending_bytes < 1:
            raise InvalidSpec(
                "a limit of the journal is out of range",
                seen=f"segment_bytes {self.segment_bytes}, max_bytes {self.max_bytes},"
                f" max_pending_bytes {self.max_pending_bytes}",
                expected="segments of more than 16 bytes, no larger than max_bytes, all above zero",
            )
