"""Memory that ranks shared in one generation is used again in the next, but never too soon."""

from pathlib import Path

import pytest
from support.collectives import kept_region_bodies
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

from shoal.backends.shared_memory.regions import KeptRegions, MemoryRegion


@pytest.mark.sampled()
@pytest.mark.parametrize(("how", "again"), [("killed", True), ("left", True), ("halted", False)])
def test_survivors_use_the_memory_again_unless_a_lost_rank_may_still_write(
    tmp_path: Path, how: str, again: bool
) -> None:
    """A halted rank may wake in the midst of a write, and continue it."""
    with Ranks() as ranks:
        body, path = kept_region_bodies.reuse_memory, str(tmp_path / "store")
        crew = [ranks.start(body, path, rank, 3, how) for rank in range(3)]
        assert [crew[rank].expect("ended")["again"] for rank in (0, 1)] == [again] * 2
        assert [crew[rank].join() for rank in (0, 1)] == [0, 0]


def test_a_region_is_deserted_while_it_has_no_other_user() -> None:
    region = MemoryRegion.create(8192)
    other = MemoryRegion(region.descriptor, region.region_id, 8192)
    assert not region.has_no_other_writer()
    other.leave()
    assert region.has_no_other_writer()
    other.acquire()
    assert not region.has_no_other_writer()
    region.leave()
    assert other.has_no_other_writer()
    region.acquire()
    other.close()
    del other
    assert region.has_no_other_writer()
    region.close()


def test_a_region_suits_sizes_from_half_to_all_of_its_size() -> None:
    region = MemoryRegion.create(8192)
    suited = [size for size in (4095, 4096, 8192, 8193) if region.fits(size)]
    region.close()
    assert suited == [4096, 8192]


def test_regions_are_taken_in_the_order_in_which_they_were_kept() -> None:
    kept, regions = KeptRegions(), [MemoryRegion.create(4096) for _ in range(3)]
    for region in regions:
        kept.keep(region)
    assert [kept.take(), kept.take()] == regions[:2]
    kept.clear()
    assert kept.take() is None
    for region in regions:
        region.close()


@pytest.mark.long
def test_fsdp_trains_on_in_the_memory_of_the_generation_before() -> None:
    """Weights are those of one process."""
    for same, difference in run_on_gloo(2, kept_region_bodies.trained_in_generations, 3):
        assert same == [True] * 6
        assert difference < 1e-5
