"""What `shoal run` adds to the environment of a worker, and what it leaves as the user set it."""

import pytest

from shoal.launcher.run_config import KEPT_MEMORY, RunConfig, worker_environment


def environment(**given: str) -> dict[str, str]:
    config = RunConfig(
        job="j", coordinators=["127.0.0.1:1"], script=["train.py"], environment=given
    )
    return worker_environment(config, "m-0")


def test_what_is_set_stays() -> None:
    """Threads and the thresholds of glibc's malloc, each by itself."""
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
def test_malloc_is_left_to_who_chose_it(given: dict[str, str], is_set: bool) -> None:
    """Thresholds are set for glibc's own malloc where nobody else has."""
    found = environment(**given)
    assert {key: found[key] for key in KEPT_MEMORY if key in found} == (
        KEPT_MEMORY if is_set else {}
    )
