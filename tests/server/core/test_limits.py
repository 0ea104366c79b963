"""Order of the time limits, and limits that operators choose."""

import pytest

from shoal_server.core.limits import Limits


def test_the_limits_for_a_hang_do_not_depend_on_the_join_limit() -> None:
    """Ten times the join limit gives ten times the bring-up limit, and leaves the limits for a hang
    as they are."""
    patient = Limits(join_s=1200.0, collective_s=30.0)
    usual = Limits()
    assert (patient.collective_s, patient.silence_s) == (usual.collective_s, usual.silence_s)
    assert patient.watchdog_s == usual.watchdog_s
    assert patient.bring_up_s == 10 * usual.bring_up_s


def test_a_collective_limit_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"watchdog_s \(240 s\) must stay below join_s \(120 s\)"):
        Limits(collective_s=120.0)
    with pytest.raises(ValueError, match=r"must stay below silence_s \(1.5 s\).*--collective-s 1,"):
        Limits(collective_s=1.0)
    with pytest.raises(ValueError, match="bad --collective-s; saw -1"):
        Limits(collective_s=-1.0)
