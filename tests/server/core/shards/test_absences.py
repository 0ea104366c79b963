"""Absences of servers: how long each server has been missing from the lists."""

from shoal_server.core.shards.absences import ServerAbsences


def test_an_absence_is_counted_from_when_it_was_first_seen() -> None:
    """The absence lasts for as long as the server is named as missing."""
    absences = ServerAbsences[str]()
    assert absences.away_s({"a"}, 10.0) == {"a": 0.0}
    assert absences.away_s({"a", "b"}, 12.5) == {"a": 2.5, "b": 0.0}


def test_a_server_that_is_present_again_is_forgotten() -> None:
    """A later absence starts over."""
    absences = ServerAbsences[str]()
    absences.away_s({"a", "b"}, 10.0)
    assert absences.away_s({"b"}, 11.0) == {"b": 1.0}
    assert absences.away_s({"a", "b"}, 12.0) == {"a": 0.0, "b": 2.0}
    assert absences.away_s((), 13.0) == {}


def test_an_absence_starts_over_after_a_gap_between_two_lists() -> None:
    """A server missing before and after a gap may have acknowledged pushes meanwhile."""
    absences = ServerAbsences[str](longest_gap_s=2.0)
    assert absences.away_s({"a"}, 10.0) == {"a": 0.0}
    assert absences.away_s({"a"}, 12.0) == {"a": 2.0}
    assert absences.away_s({"a"}, 14.5) == {"a": 0.0}


def test_an_absence_lasts_until_the_newest_list_was_requested() -> None:
    """A process that was paused after its request reads an answer from before the pause."""
    absences = ServerAbsences[str]()
    assert absences.away_s({"a"}, 11.0, asked_s=10.0) == {"a": 0.0}
    assert absences.away_s({"a"}, 300.0, asked_s=15.0) == {"a": 4.0}
