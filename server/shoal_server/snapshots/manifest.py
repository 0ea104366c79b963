"""Manifest of a snapshot, written last: names each shard's file and its checksum."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal_proto.errors import SnapshotDamaged
from shoal_proto.names import is_name

FORMAT = 1
MAX_SECONDS = 1e12
"""Bound beyond any date: a huge JSON integer would overflow a float."""
_PART_FILE = re.compile(r"parts/[0-9]{9,20}-([^/]+)/shard-[0-9]{5,10}\.safetensors")


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """A shard of a snapshot, in a file that may belong to an earlier snapshot."""

    shard_id: int
    epoch: int
    version: int
    kind: str
    """"dense" or "table"."""
    file: str
    """Path below the job's folder."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A consistent cut over all shards of a job."""

    job: str
    number: int
    cut_id: str
    lineage: str
    """Random id, replaced when the job is restored. It tells apart two states of a shard with the
    same version."""
    taken_unix_s: float
    layout: bytes
    """ShardMap as written when the job was placed, serialized."""
    parts: Sequence[ManifestEntry]
    steps: Mapping[str, int]
    """Sequence number of each session's newest step that had begun at the cut."""
    partial_steps: Sequence[str]
    """Pushes that are in some shards and not in others, with the reason."""
    cursor: Mapping[str, Any] | None
    """Sample ledger; None for a job without one."""
    training: Mapping[str, Any]
    """Generation and step; empty if unknown."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, including files of earlier snapshots."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_new_bytes(self) -> int:
        """Bytes that were written for this snapshot."""
        folder = folder_of(self.number, self.cut_id)
        return sum(part.num_bytes for part in self.parts if part.file.startswith(f"{folder}/"))

    def to_bytes(self) -> bytes:
        """Encode as JSON: `format`; `snapshot`, this manifest with its layout in base 64; and
        `sha256`, the checksum of `snapshot` as JSON with sorted keys and no spaces."""
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
        """Decode what `to_bytes` wrote. Raises SnapshotDamaged, naming the file."""
        try:
            outer = json.loads(data)
            body = outer["snapshot"]
            seen = _digest(_canonical(body))
            if outer["format"] != FORMAT:
                raise _damaged(file, f"format {outer['format']!r}", f"format {FORMAT}")
            if seen != outer["sha256"]:
                raise _damaged(file, f"SHA-256 {seen}", str(outer["sha256"]))
            parts = tuple(ManifestEntry(**part) for part in body["parts"])
            layout = base64.b64decode(body["layout"], validate=True)
            manifest = cls(**(body | {"parts": parts, "layout": layout}))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(file, repr(error)[:200], "a manifest") from error
        # The checksum does not show who wrote the manifest.
        for part in manifest.parts:
            check_part_file(part)
        wrong = _wrong_fields(manifest)
        if wrong:
            raise _damaged(file, ", ".join(wrong)[:200], "every field of its type and in its range")
        return manifest


def folder_of(number: int, cut_id: str) -> str:
    """Folder of one snapshot's files, below the job's folder."""
    return f"parts/{number:09d}-{cut_id}"


def part_file(number: int, cut_id: str, shard_id: int) -> str:
    return f"{folder_of(number, cut_id)}/shard-{shard_id:05d}.safetensors"


def check_part_file(part: ManifestEntry) -> None:
    """Raise SnapshotDamaged unless the part's file has the form of `part_file`."""
    found = _PART_FILE.fullmatch(part.file) if isinstance(part.file, str) else None
    if found is None or not is_name(found[1]):
        raise SnapshotDamaged(
            f"the manifest names a file for shard {part.shard_id} that no snapshot has",
            seen=repr(part.file)[:200],
            expected="parts/NUMBER-CUT/shard-NUMBER.safetensors",
            fix="Restore another snapshot.",
            details={"file": str(part.file)[:200], "shard": str(part.shard_id)},
        )


def _wrong_fields(manifest: Manifest) -> list[str]:
    m, wrong = manifest, []
    is_right = {
        "job": isinstance(m.job, str) and is_name(m.job),
        "number": _is_count(m.number) and m.number >= 1,
        "cut_id": isinstance(m.cut_id, str) and is_name(m.cut_id),
        "lineage": isinstance(m.lineage, str),
        "taken_unix_s": _is_finite(m.taken_unix_s),
        "parts": len(m.parts) > 0,
        "steps": isinstance(m.steps, dict) and all(map(_is_count, m.steps.values())),
        "partial_steps": _are_strings(m.partial_steps),
        "cursor": m.cursor is None or isinstance(m.cursor, dict),
        "training": isinstance(m.training, dict),
    }
    wrong += [f"{name} {getattr(m, name)!r:.60}" for name, right in is_right.items() if not right]
    for part in m.parts:
        counts = (part.shard_id, part.epoch, part.version, part.num_bytes)
        if not (all(map(_is_count, counts)) and _are_strings([part.kind, part.sha256])):
            wrong.append(repr(part))
    return wrong


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_SECONDS


def _are_strings(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(each, str) for each in values)


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
