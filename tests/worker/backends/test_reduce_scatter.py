"""Reduce-scatter that sends each part of a sum once: the same numbers as from torch's own
collective."""

import pytest
from support.collectives import scattering_bodies
from support.processes.worlds import run_on_gloo

from shoal.backends.in_memory.run import run_in_memory

BEST = {"sum has a better way", "mean has a better way"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_over_gloo_every_rank_has_its_part_of_the_sum_and_of_the_mean(world_size: int) -> None:
    """Sums are equal within the rounding of another order of additions; other reductions are left
    to torch."""
    for seen in run_on_gloo(world_size, scattering_bodies.sums_and_means):
        assert all(seen[name] for name in BEST)
        assert seen["sum"] <= 1e-6
        assert seen["mean"] <= 1e-6
        assert not seen["maximum has one"]


def test_other_transports_use_their_own_reduce_scatter() -> None:
    """Gloo is the only transport that sums up the whole for one part; sums on other transports are
    the same."""
    for seen in run_in_memory(scattering_bodies.sums_and_means, 2):
        assert not any(seen[name] for name in BEST)
        assert seen["sum"] <= 1e-6
