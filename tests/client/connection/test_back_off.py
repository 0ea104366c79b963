"""Pauses of a client between its attempts to find the leader."""

import random

from shoal_client.connection.coordinators import chance
from shoal_proto.back_off import FIRST_S, LONGEST_S, PROMPT_LONGEST_S, PROMPT_S, BackOff, doubled_s


def test_a_new_leader_is_asked_for_promptly_and_an_absent_one_seldom() -> None:
    """Pauses are short for as long as a leader failover may take; then they grow to their
    maximum."""
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


def test_after_a_success_the_next_failure_is_a_new_one() -> None:
    """The duration of the last search does not matter."""
    back_off = BackOff()
    while back_off.pause_s(chance()) < LONGEST_S / 2:
        continue
    back_off.reset()
    assert back_off.pause_s(chance()) <= FIRST_S


def test_members_do_not_come_in_step() -> None:
    """Two members that lost the same leader at the same moment wait differently, even if their
    scripts set the same seed."""
    waits = []
    for _ in range(2):
        random.seed(7)
        back_off = BackOff()
        waits.append([back_off.pause_s(chance()) for _ in range(10)])
    assert waits[0] != waits[1]


def test_a_script_draws_what_it_seeded() -> None:
    """Clients wait on threads of their own, possibly between a script's seed and its use: a Keras
    layer, for example, draws the seed of its weights from the process' generator."""
    random.seed(7)
    before = random.getstate()
    BackOff().pause_s(chance())
    assert random.getstate() == before


def test_pauses_grow_to_their_bound_and_begin_anew() -> None:
    """Pauses double each time; without a bound all are as long as the first."""
    pauses = BackOff(1.0, 5.0)
    assert [pauses.pause_s() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    pauses.reset()
    assert pauses.pause_s() == 1.0
    constant = BackOff(0.001)
    assert [constant.pause_s() for _ in range(2)] == [0.001, 0.001]


def test_the_pause_after_any_number_of_failures_keeps_to_its_bound() -> None:
    assert [doubled_s(0.5, 3.0, before) for before in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert doubled_s(0.05, 5.0, 100_000) == 5.0
