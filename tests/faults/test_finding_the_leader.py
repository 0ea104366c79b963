"""The order in which a client asks the replicas when some do not know the current leader."""

from shoal_client.connection.coordinators import Coordinators
from shoal_proto.errors import NotLeader, Unavailable

MAX_CALLS = 6


def _path(named: dict[str, str], leader: str) -> list[str]:
    """Addresses that a client asks until it finds the leader. `named`: the leader that each replica
    names."""
    coordinators = Coordinators(["a", "b", "c"])
    asked = []
    while coordinators.current != leader and len(asked) < MAX_CALLS:
        address = coordinators.current
        asked.append(address)
        coordinators.choose_next_replica(
            address,
            NotLeader("not here", details={"leader": named[address]})
            if address in named
            else Unavailable("no answer"),
        )
    assert coordinators.current == leader, asked
    return asked


def test_the_named_leader_is_asked_next() -> None:
    assert _path({"a": "c", "b": "c"}, leader="c") == ["a"]


def test_a_deposed_leader_that_names_itself_is_skipped() -> None:
    """A client asks the next replica if the one that names itself does not lead: cut off from etcd,
    a deposed leader does not learn of its successor."""
    assert _path({"a": "a"}, leader="b") == ["a"]


def test_a_dead_leader_that_is_still_named_is_skipped() -> None:
    """The search continues after the replica that gave the name."""
    assert _path({"b": "a"}, leader="c") == ["a", "b", "a"]


def test_replicas_that_name_each_other_are_skipped() -> None:
    """A name from a replica that was itself named does not count."""
    assert _path({"a": "b", "b": "a"}, leader="c")[-1] != "c"


def test_an_address_outside_the_list_is_tried_when_named() -> None:
    """A replica may advertise another address than the one that workers were given."""
    assert _path({"a": "elsewhere"}, leader="elsewhere") == ["a"]
    assert _path({"a": "elsewhere", "b": "c"}, leader="c") == ["a", "elsewhere", "b"]
