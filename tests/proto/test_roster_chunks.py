"""Rosters of many members: cut into chunks, put together again, and what two of them share."""

import zlib

import pytest

from shoal_proto.digest import roster_digest
from shoal_proto.errors import MalformedMessage
from shoal_proto.packing.roster_chunks import CHUNK_ENTRIES, assembled, cut, digest_of, digests
from shoal_proto.v1 import membership_pb2 as pb


def roster(generation: int, names: list[str], *, step: int = 0) -> pb.Roster:
    """The first rank receives its state, the others keep theirs."""
    entries = [
        pb.RosterEntry(
            member_id=name,
            rank=rank,
            host=f"host-{rank // 8}",
            address=f"10.0.{rank // 256}.{rank % 256}",
            state=pb.STATE_ACTION_KEEP if rank else pb.STATE_ACTION_RECEIVE,
            step=step if rank else 0,
            probe_port=4000 + rank % 7,
            public_id=f"{hash(name) & 0xFFFF:016x}",
        )
        for rank, name in enumerate(names)
    ]
    return pb.Roster(
        generation=generation,
        entries=entries,
        source_member_id=names[-1],
        step=step,
        planned=True,
        synchronous=True,
        fields={"strategy": "ddp", "schema": "s"},
    )


NAMES = [f"member-{number:05d}" for number in range(2 * CHUNK_ENTRIES + 70)]


def test_a_roster_put_together_is_the_one_that_was_cut() -> None:
    """Down to the digest that its members accept."""
    whole = roster(7, NAMES, step=40)
    made = cut(whole)
    assert not made.head.roster.entries
    assert set(digests(made.head)) == set(made.chunks)
    assert roster_digest(assembled(made.head, made.chunks)) == roster_digest(whole)


def test_the_next_generation_shares_all_chunks_but_those_of_the_ranks_that_changed() -> None:
    """One member goes, the last takes its rank: two chunks of names, and the states."""
    before = cut(roster(7, NAMES))
    names = [*NAMES[:-1]]
    names[3] = NAMES[-1]
    after = cut(roster(8, names, step=40))
    assert len(set(after.chunks) - set(before.chunks)) == 3
    moved = cut(roster(9, names, step=55))
    assert set(moved.chunks) - set(after.chunks) == {moved.head.states_digest}


@pytest.mark.parametrize("harm", ["cut off", "no deflate", "another chunk", "a bomb"])
def test_chunks_that_are_no_roster_are_refused(harm: str) -> None:
    """By what is wrong with them, and before they fill the memory."""
    made = cut(roster(7, NAMES))
    chunks, first = dict(made.chunks), made.head.chunk_digests[0]
    chunks[first] = {
        "cut off": chunks[first][:-9],
        "no deflate": b"not deflated",
        "another chunk": chunks[made.head.chunk_digests[-1]],
        "a bomb": zlib.compress(bytes(64 * 1024 * 1024)),
    }[harm]
    assert digest_of(chunks[first]) != first
    with pytest.raises(MalformedMessage, match=r"does not unpack|not its roster"):
        assembled(made.head, chunks)
