"""Environment of a worker: what `shoal run` adds, and what it leaves as the user set it."""

import pytest

from shoal.backends.network.own_gpu import LocalRank
from shoal.launcher.run_config import KEPT_MEMORY, RunConfig, worker_environment
from shoal.membership.join_config import read_config
from shoal_proto.errors import InvalidSpec


def environment(**given: str) -> dict[str, str]:
    config = RunConfig(
        job="j", coordinators=["127.0.0.1:1"], script=["train.py"], environment=given
    )
    return worker_environment(config, "m-0")


def test_variables_that_the_user_set_are_kept() -> None:
    """Holds for threads and for each threshold of glibc's malloc on its own."""
    mine = environment(MALLOC_TRIM_THRESHOLD_="1", OMP_NUM_THREADS="7")
    assert mine["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert mine["OMP_NUM_THREADS"] == "7"
    assert mine["MALLOC_MMAP_THRESHOLD_"] == str(32 << 20)


@pytest.mark.parametrize(
    ("given", "is_set"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, False),
        ({"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"}, False),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, False),
    ],
)
def test_thresholds_of_malloc_are_set_only_if_the_user_chose_none(
    given: dict[str, str], is_set: bool
) -> None:
    """Thresholds are set only for glibc's own malloc, and only if the user has not set them."""
    found = environment(**given)
    assert {key: found[key] for key in KEPT_MEMORY if key in found} == (
        KEPT_MEMORY if is_set else {}
    )


def test_each_worker_gets_its_local_rank_and_local_world_size() -> None:
    """A launcher's own LOCAL_RANK does not count: it may be a rank of something else."""
    config = RunConfig(
        job="j",
        coordinators=["127.0.0.1:1"],
        script=["train.py"],
        num_workers=3,
        environment={"LOCAL_RANK": "7"},
    )
    for index in range(3):
        given = worker_environment(config, f"m-{index}", index)
        read = read_config({}, given)
        assert (read.local_rank, read.local_world_size) == (index, 3)
    by_others = read_config({}, {**given, "SHOAL_LOCAL_RANK": "", "LOCAL_RANK": "5"})
    assert by_others.local_rank == 5


@pytest.mark.parametrize(
    ("rank", "world_size", "num_visible", "gpu"),
    [
        (0, 1, 8, 0),
        (5, 8, 8, 5),
        (1, 2, 8, 1),
        (3, 4, 1, 0),  # only the worker's own GPU is visible
        (1, 4, 2, None),
        (3, 4, 2, None),
    ],
)
def test_each_worker_has_a_gpu_of_its_own(
    rank: int, world_size: int, num_visible: int, gpu: int | None
) -> None:
    assert LocalRank(rank=rank, world_size=world_size).gpu(num_visible) == gpu


def test_a_model_on_the_gpu_of_another_worker_is_refused() -> None:
    place = LocalRank(rank=2, world_size=4)
    place.check(2, 4)
    with pytest.raises(InvalidSpec, match="of another worker") as refused:
        place.check(0, 4)
    assert refused.value.expected == "cuda:2"
    with pytest.raises(InvalidSpec, match="too few GPUs for its workers") as refused:
        place.check(0, 2)
    assert refused.value.seen == "4 workers, 2 GPUs"
    LocalRank().check(3, 4)  # alone on its host, it may take any
