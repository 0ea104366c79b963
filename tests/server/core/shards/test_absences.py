"""Absences of servers are counted from when a server was first missed."""

from shoal_server.core.shards.absences import ServerAbsences


def test_an_absence_is_counted_from_its_first_sight() -> None:
    """The absence lasts for as long as the server is named."""
    absences = ServerAbsences[str]()
    assert absences.away_s({"a"}, 10.0) == {"a": 0.0}
    assert absences.away_s({"a", "b"}, 12.5) == {"a": 2.5, "b": 0.0}


def test_who_is_not_named_any_more_is_forgotten() -> None:
    """A later absence begins anew, and no server is remembered for ever."""
    absences = ServerAbsences[str]()
    absences.away_s({"a", "b"}, 10.0)
    assert absences.away_s({"b"}, 11.0) == {"b": 1.0}
    assert absences.away_s({"a", "b"}, 12.0) == {"a": 0.0, "b": 2.0}
    assert absences.away_s((), 13.0) == {}


def test_an_absence_begins_anew_after_a_gap_between_two_looks() -> None:
    """A server missing before and after a gap may have been there between, and acknowledged."""
    absences = ServerAbsences[str](longest_gap_s=2.0)
    assert absences.away_s({"a"}, 10.0) == {"a": 0.0}
    assert absences.away_s({"a"}, 12.0) == {"a": 2.0}
    assert absences.away_s({"a"}, 14.5) == {"a": 0.0}


def test_what_was_asked_for_long_ago_says_nothing_of_now() -> None:
    """A process paused after its request has an answer from before the pause."""
    absences = ServerAbsences[str]()
    assert absences.away_s({"a"}, 11.0, asked_s=10.0) == {"a": 0.0}
    assert absences.away_s({"a"}, 300.0, asked_s=15.0) == {"a": 4.0}
