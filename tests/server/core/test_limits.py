"""Order of the time limits, and the limits that operators choose."""

import pytest

from shoal_server.core.limits import Limits


def test_a_hang_is_found_as_soon_however_long_a_join_may_take() -> None:
    """The limit of a collective is independent: ten times the join limit leaves it as it is."""
    patient = Limits(join_s=1200.0, collective_s=30.0)
    usual = Limits()
    assert (patient.collective_s, patient.silence_s) == (usual.collective_s, usual.silence_s)
    assert patient.watchdog_s == usual.watchdog_s
    assert patient.bring_up_s == 10 * usual.bring_up_s


def test_a_limit_of_collectives_that_is_out_of_order_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"watchdog_s \(240 s\) must stay below join_s \(120 s\)"):
        Limits(collective_s=120.0)
    with pytest.raises(ValueError, match=r"must stay below silence_s \(1.5 s\).*--collective-s 1,"):
        Limits(collective_s=1.0)
    with pytest.raises(ValueError, match="bad --collective-s; saw -1"):
        Limits(collective_s=-1.0)
