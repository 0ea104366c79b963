"""What a snapshot is: a manifest, written last, that names each shard's file and its checksum."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal_proto.errors import SnapshotDamaged

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """One shard of a snapshot, in a file that may belong to an earlier snapshot."""

    shard_id: int
    epoch: int
    """As of which the shard was taken."""
    version: int
    kind: str
    file: str
    """Path below the job's folder."""
    num_bytes: int
    sha256: str
    """Of the whole file, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A consistent cut over all shards of a job."""

    job: str
    number: int
    """Rises from snapshot to snapshot."""
    cut_id: str
    lineage: str
    """Drawn anew when the job is restored: versions count on from there a second time."""
    taken_unix_s: float
    layout: bytes
    """The job's ShardMap, serialized. Its servers are those that held the shards then."""
    parts: Sequence[Part]
    """One for each shard of the layout, by shard id."""
    steps: Mapping[str, int]
    """Per session the newest push that is in the snapshot."""
    partial_steps: Sequence[str]
    """Pushes of which some shards have their part and others do not, with the reason."""
    cursor: Mapping[str, Any] | None
    """The sample ledger, as `core.ledger.Ledger.to_json` gives it; None for a job without one."""
    training: Mapping[str, Any]
    """What else the job said of itself: generation and step."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, whichever snapshot's files they lie in."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_new_bytes(self) -> int:
        """Bytes that were written for this snapshot."""
        own = folder_of(self.number, self.cut_id)
        return sum(part.num_bytes for part in self.parts if part.file.startswith(f"{own}/"))

    def to_bytes(self) -> bytes:
        """JSON with a checksum of itself."""
        body = asdict(self) | {
            "layout": base64.b64encode(self.layout).decode(),
            "parts": [asdict(part) for part in self.parts],
        }
        text = _canonical(body)
        return json.dumps(
            {"format": FORMAT, "sha256": _digest(text), "snapshot": body}, indent=1
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, file: str) -> "Manifest":
        """What `to_bytes` wrote. Raises SnapshotDamaged, naming the file."""
        try:
            outer = json.loads(data)
            body = outer["snapshot"]
            seen = _digest(_canonical(body))
            if outer["format"] != FORMAT:
                raise _damaged(file, f"format {outer['format']!r}", f"format {FORMAT}")
            if seen != outer["sha256"]:
                raise _damaged(file, f"SHA-256 {seen}", str(outer["sha256"]))
            parts = tuple(Part(**part) for part in body["parts"])
            layout = base64.b64decode(body["layout"], validate=True)
            return cls(**(body | {"parts": parts, "layout": layout}))
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(file, repr(error)[:200], "a manifest") from error


def folder_of(number: int, cut_id: str) -> str:
    """Where the files of one snapshot lie, below the job's folder."""
    return f"parts/{number:09d}-{cut_id}"


def part_file(number: int, cut_id: str, shard_id: int) -> str:
    return f"{folder_of(number, cut_id)}/shard-{shard_id:05d}.safetensors"


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged(file: str, seen: str, expected: str) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"the manifest {file} is not what was written",
        seen=seen,
        expected=expected,
        fix="Restore another snapshot.",
        details={"file": file},
    )


__all__ = ["Manifest", "Part", "folder_of", "part_file"]
