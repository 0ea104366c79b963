"""Figures that the benches draw from what workers committed."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def effective() -> Any:
    from training import effective  # noqa: PLC0415 - bench/ is on the path of a test only

    return effective


@pytest.fixture
def step() -> Callable[..., Any]:
    from training.steps import Step  # noqa: PLC0415

    def made(at_s: float, number: int, formation: int = 1, pid: int = 1) -> Any:
        return Step(at_s=at_s, pid=pid, agent=0, formation=formation, world_size=2, step=number)

    return made


def test_a_run_without_a_change_is_effective_throughout(effective: Any, step: Any) -> None:
    """Two workers commit each step, which counts once."""
    steps = [step(at / 10 + pid / 1000, at, pid=pid) for at in range(101) for pid in (1, 2)]
    found = effective.effective(steps, 0.0, 10.0)
    assert found.effective == pytest.approx(1.0, abs=0.02)
    assert found.step_s == pytest.approx(0.1)
    assert (found.steps_twice, found.steps_lost) == (0, 0)


def test_a_pause_is_not_effective(effective: Any, step: Any) -> None:
    """Steps are missing in two of ten seconds; the next formation repeats none."""
    steps = [step(at / 10, at) for at in range(50)]
    steps += [step(7.0 + at / 10, 50 + at, formation=2) for at in range(30)]
    found = effective.effective(steps, 0.0, 10.0)
    assert found.effective == pytest.approx(0.8, abs=0.02)
    assert found.longest_pause_s == pytest.approx(2.1)
    assert found.paused_per_change_s(1) == pytest.approx(2.0, abs=0.2)
    assert found.stalled_s == pytest.approx(2.0)
    assert found.steps_twice == 0


def test_slow_steps_are_no_stall(effective: Any, step: Any) -> None:
    """A third of the steps takes half as long again: `paused_s` contains that, `stalled_s` only the
    one pause."""
    ends, at_s = [], 0.0
    for number in range(300):
        at_s += 0.15 if number % 3 == 0 else 0.1
        at_s += 1.0 if number == 150 else 0.0
        ends.append(at_s)
    found = effective.effective([step(at, n) for n, at in enumerate(ends)], 0.0, ends[-1])
    assert found.step_s == pytest.approx(0.1)
    assert found.stalled_s == pytest.approx(1.0, abs=0.06)
    assert found.paused_s > 5.0


def test_steps_that_a_restart_took_back_count_once(effective: Any, step: Any) -> None:
    """A restart to step 30 after step 49 has twenty steps trained twice, and each counts once."""
    steps = [step(at / 10, at) for at in range(50)]
    steps += [step(5.0 + at / 10, 30 + at, formation=2) for at in range(50)]
    found = effective.effective(steps, 0.0, 10.0)
    assert found.steps_twice == 20
    assert found.effective == pytest.approx(0.8, abs=0.02)


def test_a_job_that_began_again_counts_only_its_later_steps(effective: Any, step: Any) -> None:
    steps = [step(at / 10, at) for at in range(80)]
    steps += [step(8.0 + at / 10, at, formation=2) for at in range(20)]
    found = effective.effective(steps, 0.0, 10.0)
    assert found.useful_steps == 20
    assert found.steps_twice == 20


def test_steps_that_no_worker_trained_are_lost(effective: Any, step: Any) -> None:
    steps = [step(at / 10, at) for at in range(100) if at not in (40, 41)]
    assert effective.effective(steps, 0.0, 10.0).steps_lost == 2


def test_steps_before_the_start_do_not_count(effective: Any, step: Any) -> None:
    steps = [step(at / 10, at) for at in range(150)]
    found = effective.effective(steps, 5.0, 10.0)
    assert found.useful_steps == pytest.approx(50, abs=1)
    assert found.wall_s == 5.0


def test_a_run_of_no_step_is_not_effective_at_all(effective: Any) -> None:
    found = effective.effective([], 0.0, 10.0)
    assert (found.effective, found.paused_s, found.stalled_s) == (0.0, 10.0, 10.0)


def test_the_interval_of_daly_is_that_of_young_for_a_cheap_checkpoint(effective: Any) -> None:
    """Young's interval is sqrt(2 C M), 200 s for 10 s and 2,000 s. Daly's differs by less than 2
    %."""
    assert effective.daly_interval_s(10.0, 2000.0) == pytest.approx(200.0, rel=0.05)
    assert effective.daly_interval_s(50.0, 20.0) == 20.0


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(1.0, 60.0), (0.01, 10.0), (5.0, 20.0)])
def test_no_other_interval_loses_less(effective: Any, cost_s: float, mtbf_s: float) -> None:
    """The effective share is that of the model in bench/goodput_model.py, with a restart that takes
    no time."""
    from math import exp, expm1  # noqa: PLC0415

    def share(interval_s: float) -> float:
        return interval_s / (mtbf_s * exp(0.0) * expm1((interval_s + cost_s) / mtbf_s))

    best_s = effective.daly_interval_s(cost_s, mtbf_s)
    assert all(share(best_s * factor) <= share(best_s) for factor in (0.7, 1.4))
    assert effective.checkpoint_every(cost_s, mtbf_s, best_s / 12) == 12


def test_growth_is_counted_from_a_tenth_of_the_kills() -> None:
    from training.usage import Usage, growth_per_kill  # noqa: PLC0415

    samples = [
        {"coordinator": Usage(memory_kib=1000 + 5000 * (at > 0) + 10 * at, threads=8, files=30)}
        for at in range(21)
    ]
    growth = growth_per_kill(samples, 100)["coordinator"]
    assert growth["memory_kib"] == pytest.approx(0.1)
    assert (growth["threads"], growth["files"]) == (0, 0)
