"""Contract of torchrun's own backend, kept by Shoal's handler."""

import gc
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
from support.processes.served_process import awaited
from support.torchrun.handlers import (
    PATIENCE_S,
    Join,
    await_change,
    parameters,
    together,
)
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from shoal.torchrun import create_handler
from shoal_client.local.cluster import LocalCluster

SOON_S = 15.0
"""Less than any limit of the coordinator for a silent member."""


def workers_store(info: RendezvousInfo) -> TCPStore:
    assert info.bootstrap_store_info is not None
    port = info.bootstrap_store_info.master_port
    return TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))


def test_a_closed_job_is_closed_for_all_nodes_while_training_goes_on(join: Join) -> None:
    """The other node sees it; no node joins or re-forms. Training nodes keep both stores."""
    first, second = join(), join()
    infos = together(first, second)
    stores = [workers_store(info) for info in infos]
    first.set_closed()
    assert first.is_closed()
    awaited(second.is_closed, SOON_S, "the other sees it")
    assert second.num_nodes_waiting() == 0
    stores[0].set("workers", "share")
    assert stores[1].get("workers") == b"share"
    infos[0].store.set("agents", b"share")
    assert infos[1].store.get("agents") == b"share"
    for handler in (first, second):
        with pytest.raises(RendezvousClosedError):
            handler.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="closed the rendezvous"):
        join()
    first.set_closed()
    assert first.shutdown()
    stores[1].set("still", "there")
    assert stores[0].get("still") == b"there"
    assert second.shutdown()


def test_a_node_that_waits_learns_that_the_job_is_closed(join: Join) -> None:
    """Holds also before there is a first generation."""
    first, second = join((3, 3)), join((3, 3))
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(second.next_rendezvous)
        with pytest.raises(TimeoutError):
            coming.result(timeout=0.5)
        first.set_closed()
        with pytest.raises(RendezvousClosedError):
            coming.result(timeout=SOON_S)


def test_a_node_that_gave_up_is_not_counted(join: Join) -> None:
    """Two later nodes train together at once; the node that gave up may join again later."""
    late = join((2, 2), join_timeout="0.5")
    with pytest.raises(RendezvousTimeoutError):
        late.next_rendezvous()
    began_s = time.monotonic()
    infos = together(join((2, 2)), join((2, 2)))
    assert time.monotonic() - began_s < SOON_S
    assert [info.world_size for info in infos] == [2, 2]


def test_all_waiting_nodes_are_counted_and_none_once_they_are_admitted(join: Join) -> None:
    """Nodes that would come in are all counted, although one came first; none once they have."""
    first = join((1, 3), last_call_timeout="0.2")
    together(first)
    others = [join((1, 3), last_call_timeout="0.2") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        coming = [threads.submit(other.next_rendezvous) for other in others]
        assert await_change(first, at_least=2) == 2
        infos = [first.next_rendezvous()]
        while infos[-1].world_size < 3:
            # One of them had come in alone: it re-forms too, to admit the other.
            wait(coming, return_when=FIRST_COMPLETED)
            (inside,) = [other for other, one in zip(others, coming, strict=True) if one.done()]
            coming += [threads.submit(inside.next_rendezvous)]
            await_change(first)
            infos.append(first.next_rendezvous())
    assert first.num_nodes_waiting() == 0


def test_threads_end_with_a_handler_that_is_dropped(cluster: LocalCluster) -> None:
    before = set(threading.enumerate())
    handler = create_handler(parameters(cluster.coordinator, "dropped", last_call_timeout="0.2"))
    together(handler)
    assert any(thread.name == "shoal-member" for thread in set(threading.enumerate()) - before)
    del handler
    gc.collect()

    def ended() -> bool:
        left = set(threading.enumerate()) - before
        return not any(thread.name.startswith("shoal-") for thread in left)

    awaited(ended, PATIENCE_S, "its threads end")


def test_workers_may_serve_their_store_themselves(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own variable asks for it: then rank 0 of the workers serves the store, on a port that
    was free."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    first, second = join(), join()
    infos = together(first, second)
    assert not first.use_agent_store
    ports = {info.bootstrap_store_info.master_port for info in infos if info.bootstrap_store_info}
    (port,) = ports
    TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_a_job_completes_with_the_last_of_its_nodes(join: Join) -> None:
    """A node that shuts down is done; the other may re-form, though two is the minimum."""
    first, second = join((2, 2)), join((2, 2))
    together(first, second)
    assert first.shutdown()
    assert first.is_closed()
    again = second.next_rendezvous()
    assert (again.rank, again.world_size) == (0, 1)
    assert not second.is_closed()
    assert second.shutdown()
    with pytest.raises(RendezvousClosedError, match="finished"):
        join((2, 2))
