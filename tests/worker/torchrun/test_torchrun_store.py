"""The store that torchrun's agents get fails as torch's own stores do."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.network.gates import Network
from support.torchrun.handlers import Join, await_change, together
from torch import distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.utils import store as store_util

from shoal_client.local.cluster import LocalCluster


def test_a_wait_that_times_out_raises_dist_store_error(join: Join) -> None:
    """The error is a DistStoreError, which is a RuntimeError, with the word timeout and the keys.
    The limit is that of the call, or of the store."""
    (info,) = together(join(last_call_timeout="0.2"))
    store = info.store
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.1 s for absent"):
        store.wait(["absent"], timedelta(seconds=0.1))
    store.set_timeout(timedelta(seconds=0.1))
    for read in (store.get, lambda key: store.wait([key]), lambda key: store.multi_get([key])):
        with pytest.raises(RuntimeError, match="timeout"):
            read("absent")
    with (
        pytest.raises(dist.DistStoreError),
        store_util.store_timeout(store, 0.05),
    ):
        store.get("absent")
    store.set("present", b"1")
    assert store.get("present") == b"1"


def test_a_barrier_names_the_ranks_that_are_missing(join: Join) -> None:
    """torch's own trace names them, on all ranks that came."""
    infos = sorted(together(join((3, 3)), join((3, 3)), join((3, 3))), key=lambda info: info.rank)

    def come(info: RendezvousInfo) -> str:
        with pytest.raises(dist.DistStoreError) as error:
            store_util.barrier(
                info.store,
                3,
                "point",
                barrier_timeout=1.0,
                rank=info.rank,
                rank_tracing_decoder=lambda rank: f"host-{rank}",
                trace_timeout=0.2,
            )
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(come, infos[:2]))
    assert "missing_ranks=[host-2]" in answers[0]
    assert "check rank 0 (host-0)" in answers[1]


@pytest.mark.long
def test_an_unreachable_or_ended_store_raises_dist_network_error(
    join: Join, cluster: LocalCluster
) -> None:
    """The error is a DistNetworkError, as with a TCPStore whose host is gone."""
    first = join()
    with Network() as network:
        wire = network.wire(cluster.coordinator)
        second = join(endpoint=wire.endpoints[0], close_timeout="1")
        before = together(first, second)
        store = before[1].store
        store.set_timeout(timedelta(seconds=1))
        wire.cut()
        for use in (lambda: store.set("key", b"1"), lambda: store.add("count", 1)):
            with pytest.raises(dist.DistNetworkError):
                use()
        await_change(first)
        with pytest.raises(dist.DistNetworkError):
            before[0].store.get("key")
        wire.restore()


def test_queues_and_lists_of_keys_are_not_implemented(join: Join) -> None:
    """Queues do not exist, and calls say so; agents use none."""
    (info,) = together(join(last_call_timeout="0.2"))
    for use in (
        lambda: info.store.queue_push("queue", b"1"),
        lambda: info.store.queue_pop("queue"),
        lambda: info.store.queue_len("queue"),
        *([info.store.list_keys] if hasattr(dist.Store, "list_keys") else []),  # from torch 2.11 on
    ):
        with pytest.raises(NotImplementedError):
            use()
