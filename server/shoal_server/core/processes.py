"""Identities of processes: a restarted process keeps its name and gets a new incarnation."""

from dataclasses import dataclass
from typing import NamedTuple


class MemberProcess(NamedTuple):
    """A process of a member."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A process of a parameter server, as a holder of shards."""

    server_id: str
    incarnation: str
