"""Pauses of a client between its attempts."""

import random

from shoal_client.connection.coordinators import chance
from shoal_proto.back_off import FIRST_S, LONGEST_S, PROMPT_LONGEST_S, PROMPT_S, BackOff, doubled_s


def test_pauses_are_short_for_a_leader_failover_and_then_grow() -> None:
    """Pauses between attempts are short for as long as a leader failover may take, and then grow to
    their maximum."""
    back_off, waited_s, num_prompt = BackOff(), 0.0, 0
    while waited_s < PROMPT_S:
        pause_s = back_off.pause_s(chance())
        assert 0 < pause_s <= PROMPT_LONGEST_S
        waited_s += pause_s
        num_prompt += 1
    assert num_prompt <= 2 * PROMPT_S / PROMPT_LONGEST_S + 5
    later = [back_off.pause_s(chance()) for _ in range(20)]
    assert min(later[10:]) >= LONGEST_S / 2
    assert max(later) <= LONGEST_S


def test_pauses_start_over_after_a_success() -> None:
    """The length of earlier pauses does not matter."""
    back_off = BackOff()
    while back_off.pause_s(chance()) < LONGEST_S / 2:
        continue
    back_off.reset()
    assert back_off.pause_s(chance()) <= FIRST_S


def test_pauses_differ_between_members() -> None:
    """Members that lose the same leader at the same time wait differently, even if their scripts
    set the same seed."""
    waits = []
    for _ in range(2):
        random.seed(7)
        back_off = BackOff()
        waits.append([back_off.pause_s(chance()) for _ in range(10)])
    assert waits[0] != waits[1]


def test_pauses_leave_the_scripts_random_numbers() -> None:
    """A client's thread may wait between a script's seed and its use of the process' generator."""
    random.seed(7)
    before = random.getstate()
    BackOff().pause_s(chance())
    assert random.getstate() == before


def test_pauses_grow_to_their_bound_and_start_over() -> None:
    """Pauses double each time; without a bound all are as long as the first."""
    pauses = BackOff(1.0, 5.0)
    assert [pauses.pause_s() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    pauses.reset()
    assert pauses.pause_s() == 1.0
    constant = BackOff(0.001)
    assert [constant.pause_s() for _ in range(2)] == [0.001, 0.001]


def test_the_pause_after_any_number_of_failures_is_bounded() -> None:
    assert [doubled_s(0.5, 3.0, before) for before in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert doubled_s(0.05, 5.0, 100_000) == 5.0
