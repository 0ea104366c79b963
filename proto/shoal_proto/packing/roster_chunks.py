"""Rosters of many members, cut into chunks that are addressed by their digests.

A chunk holds what a member keeps as long as it stays: its name, rank, process and address. State
and step, which are different in each generation, are a chunk of their own. So the rosters of two
generations in a row share all chunks but those in which a rank changed hands, and nobody is sent
again what it holds. What comes is checked: a chunk against its digest, and the whole roster against
the digest that its members accept (`shoal_proto.digest`), which does not depend on how it is cut.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shoal_proto.errors import MalformedMessage
from shoal_proto.v1 import membership_pb2 as pb

CHUNK_ENTRIES = 500
MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Of a chunk that is unpacked."""
LEVEL = 1
"""Fast: names and addresses of one cluster are much alike, and shrink to a third at any level."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, kw_only=True)
class CutRoster:
    head: pb.RosterHead
    chunks: Mapping[bytes, bytes]
    """All that the head names, by digest."""


def is_cut(roster: pb.Roster) -> bool:
    """Whether a roster is large enough for chunks."""
    return len(roster.entries) > CHUNK_ENTRIES


def cut(roster: pb.Roster) -> CutRoster:
    """The roster as head and chunks. The head is a message of its own."""
    head = pb.RosterHead(num_entries=len(roster.entries))
    head.roster.CopyFrom(roster)
    head.roster.ClearField("entries")
    chunks: dict[bytes, bytes] = {}
    for start in range(0, len(roster.entries), CHUNK_ENTRIES):
        part = pb.RosterChunk(entries=roster.entries[start : start + CHUNK_ENTRIES])
        for entry in part.entries:
            entry.ClearField("state")
            entry.ClearField("step")
        head.chunk_digests.append(put(part, chunks))
    states = pb.RosterStates()
    for (state, step), same in groupby((entry.state, entry.step) for entry in roster.entries):
        states.counts.append(sum(1 for _ in same))
        states.states.append(state)
        states.steps.append(step)
    head.states_digest = put(states, chunks)
    return CutRoster(head=head, chunks=chunks)


def put(message: Message, chunks: dict[bytes, bytes]) -> bytes:
    """Add the message as a chunk; its digest."""
    data = zlib.compress(message.SerializeToString(deterministic=True), LEVEL)
    digest = digest_of(data)
    chunks[digest] = data
    return digest


def taken(kind: type[M], data: bytes) -> M:
    """The message of a chunk. Raises MalformedMessage."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(data, MAX_CHUNK_BYTES)
        if not unpacking.eof:
            raise zlib.error("longer than any chunk, or cut off")
        return kind.FromString(plain)
    except (zlib.error, DecodeError) as error:
        raise MalformedMessage(
            f"a chunk of {len(data)} bytes does not unpack",
            seen=str(error),
            expected=f"a deflated {kind.DESCRIPTOR.name} of at most {MAX_CHUNK_BYTES} bytes",
        ) from error


def digest_of(chunk: bytes) -> bytes:
    """What a chunk is addressed by."""
    return hashlib.sha256(chunk).digest()


def digests(head: pb.RosterHead) -> Sequence[bytes]:
    """Of all chunks that the roster is made of."""
    return [*head.chunk_digests, head.states_digest]


def assembled(head: pb.RosterHead, chunks: Mapping[bytes, bytes]) -> pb.Roster:
    """The roster. `chunks` has all that `digests` names. Raises MalformedMessage."""
    roster = pb.Roster()
    roster.CopyFrom(head.roster)
    for digest in head.chunk_digests:
        roster.entries.extend(taken(pb.RosterChunk, chunks[digest]).entries)
    states = taken(pb.RosterStates, chunks[head.states_digest])
    told = (len(states.counts), len(states.states), len(states.steps))
    if len(roster.entries) != head.num_entries or sum(states.counts) != head.num_entries:
        raise _unlike(f"{len(roster.entries)} entries, {sum(states.counts)} states", head)
    if len(set(told)) != 1:
        raise _unlike(f"{told} counts, states and steps", head)
    entries = iter(roster.entries)
    for count, state, step in zip(states.counts, states.states, states.steps, strict=True):
        for _ in range(count):
            entry = next(entries)
            entry.state, entry.step = state, step
    return roster


def _unlike(seen: str, head: pb.RosterHead) -> MalformedMessage:
    return MalformedMessage(
        f"the chunks of generation {head.roster.generation} are not its roster",
        seen=seen,
        expected=f"{head.num_entries} of each",
    )
