"""How long a client waits between its attempts to find who leads."""

import random

from shoal_client.connection.back_off import (
    FIRST_BACK_OFF_S,
    MAX_BACK_OFF_S,
    PROMPT_BACK_OFF_S,
    PROMPT_S,
    BackOff,
)
from shoal_client.connection.coordinators import chance


def test_a_new_leader_is_asked_for_promptly_and_an_absent_one_seldom() -> None:
    """For the length of a fail-over no pause is long; after that they grow to their maximum."""
    back_off, waited_s, num_prompt = BackOff(), 0.0, 0
    while waited_s < PROMPT_S:
        pause_s = back_off.pause_s(chance())
        assert 0 < pause_s <= PROMPT_BACK_OFF_S
        waited_s += pause_s
        num_prompt += 1
    assert num_prompt <= 2 * PROMPT_S / PROMPT_BACK_OFF_S + 5
    later = [back_off.pause_s(chance()) for _ in range(20)]
    assert min(later[10:]) >= MAX_BACK_OFF_S / 2
    assert max(later) <= MAX_BACK_OFF_S


def test_after_a_success_the_next_failure_is_a_new_one() -> None:
    """However long the last search took."""
    back_off = BackOff()
    while back_off.pause_s(chance()) < MAX_BACK_OFF_S / 2:
        continue
    back_off.reset()
    assert back_off.pause_s(chance()) <= FIRST_BACK_OFF_S


def test_members_do_not_come_in_step() -> None:
    """Two that lost the same leader at the same moment wait differently, whatever their scripts
    have seeded."""
    waits = []
    for _ in range(2):
        random.seed(7)
        back_off = BackOff()
        waits.append([back_off.pause_s(chance()) for _ in range(10)])
    assert waits[0] != waits[1]


def test_a_script_draws_what_it_seeded() -> None:
    """Clients wait on threads of their own, at any moment between a seed and what it is for: a
    Keras layer, for one, draws the seed of its weights from the process's generator."""
    random.seed(7)
    before = random.getstate()
    BackOff().pause_s(chance())
    assert random.getstate() == before
