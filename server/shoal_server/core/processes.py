"""Identities of processes: a restarted one has the name of the earlier one, and another
incarnation."""

from dataclasses import dataclass
from typing import NamedTuple


class MemberProcess(NamedTuple):
    """One process of a member."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A server process. The incarnation distinguishes a restarted server from the earlier
    process."""

    server_id: str
    incarnation: str
