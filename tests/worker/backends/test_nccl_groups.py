"""Parts of NCCL's groups, on machines without a GPU: Gloo replaces NCCL's transport.

The behaviour of torch's NCCL is read from its ProcessGroupNCCL.cpp and NCCLUtils.cpp (2.9 to 2.13):
`abort` starts `abortComms` in a thread and waits for it up to the group's limit, then raises
DistBackendError. The first operation of a group makes its communicator, in a call that blocks until
all ranks are in it.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torch.distributed as dist
from support.collectives import nccl_bodies
from support.processes.load import unhurried
from support.processes.ranks import Ranks

from shoal.backends.abortable.communicators import connect
from shoal.backends.abortable.waiter import AbortableWaiter
from shoal.backends.network.cuda_progress import DeviceProgress, cuda_progress
from shoal.backends.network.nccl import Aborts, Cuda
from shoal.backends.network.nccl_environment import REQUIRED, require_survival
from shoal.backends.network.own_gpu import LocalRank, check_unshared
from shoal.model.gradients import are_finite, is_finite
from shoal_proto.errors import InvalidSpec

# --- the environment ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_NCCL_NAN_CHECK", "1"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "1"),
        ("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", "1"),
    ],
)
def test_nccl_settings_that_would_end_a_survivor_are_replaced(name: str, value: str) -> None:
    """The value is replaced, and one warning names the replaced value."""
    environment = {name: value, "NCCL_DEBUG": "INFO"}
    with structlog.testing.capture_logs() as logs:
        require_survival(environment)
        require_survival(environment)
    assert environment == {**REQUIRED, "NCCL_DEBUG": "INFO"}
    (warning,) = logs
    assert warning["event"] == "nccl_environment_replaced"
    assert f"{name}={value}" in warning["replaced"]


def test_an_environment_without_contrary_settings_is_completed_without_a_warning() -> None:
    environment = {"NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    with structlog.testing.capture_logs() as logs:
        require_survival(environment)
    assert not logs
    assert {name: environment[name] for name in REQUIRED} == REQUIRED
    assert REQUIRED["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert REQUIRED["TORCH_NCCL_ENABLE_MONITORING"] == "0"


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_blocking_waits_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidSpec, match=name) as refused:
        require_survival({name: value})
    assert refused.value.seen == f"{name}={value}"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "on", "1 or 0"),
        ("TORCH_NCCL_ENABLE_TIMING", "2", "1 or 0"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", " 1", "1 or 0"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "ten", "a whole number up to 2147483647"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "none", "a whole number up to 2147483647"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "3000000000", "a whole number up to 2147483647"),
    ],
)
def test_a_value_that_torch_cannot_read_is_refused_by_name(
    name: str, value: str, expected: str
) -> None:
    """torch raises for such a value in each generation, with an error that looks like one of a lost
    peer."""
    with pytest.raises(InvalidSpec, match=name) as refused:
        require_survival({name: value})
    assert (refused.value.seen, refused.value.expected) == (f"{name}={value}", expected)


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ENABLE_TIMING",
        "TORCH_NCCL_RANKS_PER_ROOT",
        "TORCH_FR_BUFFER_SIZE",
    ],
)
@pytest.mark.parametrize("value", ["", " "])
def test_a_variable_with_an_empty_value_counts_as_unset(name: str, value: str) -> None:
    environment = {
        name: value,
        "TORCH_NCCL_CUDA_EVENT_CACHE": "True",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600s",
    }
    require_survival(environment)
    assert name not in environment and environment["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "600s"


# --- a cut ---


class Backend:
    """A group's backend whose abort calls `does`."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self._does, self.num_aborts = does, 0

    def abort(self) -> None:
        self.num_aborts += 1
        self._does()


def _fails() -> None:
    raise dist.DistBackendError("ProcessGroup abort timed out")


def test_each_group_is_aborted_though_the_abort_of_another_hangs_or_fails() -> None:
    """The first abort hangs, as after a kernel of a group that waits for a lost peer; the second
    fails."""
    hang, ended = threading.Event(), threading.Event()
    stuck, failing, last = Backend(hang.wait), Backend(_fails), Backend(ended.set)
    aborts = Aborts()
    with structlog.testing.capture_logs() as logs:
        aborts.begin([stuck, failing, last])
        assert ended.wait(30.0)
        aborts.begin([stuck, failing, last])
        assert not aborts.wait(0.05)
        hang.set()
        assert aborts.wait(30.0)
    assert [each.num_aborts for each in (stuck, failing, last)] == [1, 1, 1]
    assert [each["event"] for each in logs] == ["abort_failed"]


@pytest.mark.parametrize("body", ["in_a_collective", "in_a_subgroup"])
def test_a_cut_ends_a_wait_on_the_host_for_a_stopped_peer(tmp_path: Path, body: str) -> None:
    """Gloo's part of the group is cut like a group on CPUs: a stopped peer delays no other rank."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(nccl_bodies.cut, path, rank, body) for rank in range(2)]
        assert crew[0].expect("cut")["seconds"] < unhurried(2.0)
        assert crew[0].expect("retired") == {"is_initialized": False, "aborted": 2}
        assert crew[0].join() == 0


def test_the_hosts_part_of_a_group_can_be_cut_and_shares_memory(tmp_path: Path) -> None:
    """The host's part can be cut, and its ranks share memory for their votes. The same holds for
    subgroups."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(nccl_bodies.host_part, path, rank) for rank in range(2)]
        for rank in crew:
            found = rank.expect("found")
            assert found["can_be_cut"] == [True, True]
            assert found["is_gloo"] == [True, True]
            assert found["words_are_shared"]
            assert found["watches_peers"]
            assert found["received"] == [[10], [11]]
            assert rank.join() == 0


@pytest.mark.long
def test_generations_follow_each_other_without_a_leak(tmp_path: Path) -> None:
    """Half of the generations end by a cut."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(nccl_bodies.generations, path, rank, 20) for rank in range(2)]
        for rank in crew:
            done = rank.expect("done")
            assert done["descriptors"] < 10
            assert done["threads"] < 10
            assert rank.join() == 0


# --- a bring-up ---


class Alone:
    """A group with a peer that never comes: its first operation blocks until all ranks are in it
    (`ncclCommInitRank`)."""

    def __init__(self) -> None:
        self.entered, self.left = threading.Event(), threading.Event()

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.entered.set()
        self.left.wait()
        return self

    def wait(self) -> None: ...


def test_a_wait_for_a_communicator_ends_with_an_abort() -> None:
    group: Any = Alone()
    waiter = AbortableWaiter(for_good=True)
    cutter = threading.Thread(target=lambda: (group.entered.wait(), waiter.abort("a peer is lost")))
    cutter.start()
    with pytest.raises(dist.DistBackendError, match="a peer is lost"):
        connect(group, torch.device("cpu"), waiter)
    with pytest.raises(dist.DistBackendError, match="a peer is lost"):
        connect(group, torch.device("cpu"), waiter)
    group.left.set()
    cutter.join()


def test_an_error_in_making_a_communicator_is_raised() -> None:
    class Broken(Alone):
        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            raise RuntimeError("NCCL error: unhandled system error")

    group: Any = Broken()
    with pytest.raises(dist.DistBackendError, match="unhandled system error"):
        connect(group, torch.device("cpu"), AbortableWaiter())


def test_a_bring_up_within_a_communicators_creation_ends_with_a_cut(tmp_path: Path) -> None:
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(nccl_bodies.cut_in_bring_up, path, rank) for rank in range(2)]
        message = crew[0].expect("broken")
        assert message["seconds"] < unhurried(2.0)
        assert "ended while it was brought up" in message["text"]
        assert crew[0].join() == 0


# --- a session's watch of a device ---


class Event:
    """A device event that the test completes by setting `is_reached`."""

    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached


def test_a_device_is_stalled_only_while_an_event_is_pending() -> None:
    events: list[Event] = []

    def record() -> Event:
        events.append(Event())
        return events[-1]

    progress = DeviceProgress(record)
    for now_s in (1.0, 2.0):
        assert progress.stalled_since_s(now_s) is None
        events[-1].is_reached = True
    assert progress.stalled_since_s(3.0) is None
    assert progress.stalled_since_s(4.0) == 3.0
    assert progress.stalled_since_s(9.0) == 3.0
    events[-1].is_reached = True
    assert progress.stalled_since_s(10.0) is None
    assert len(events) == 4


def test_a_device_that_has_failed_is_no_longer_watched() -> None:
    def record() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    progress = DeviceProgress(record)
    with structlog.testing.capture_logs() as logs:
        assert progress.stalled_since_s(1.0) is None
        assert progress.stalled_since_s(2.0) is None
    assert [each["event"] for each in logs] == ["device_not_watched"]


class FailingGraph:
    """A CUDA graph whose capture cannot begin."""

    def capture_begin(self) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def capture_end(self) -> None:
        raise AssertionError("torch does not end a capture that has not begun")


def test_a_stall_is_seen_after_a_capture_that_could_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FailingGraph)
    cuda_progress(torch.device("cuda", 0))  # tracks captures from here on
    with pytest.raises(RuntimeError, match="not permitted"):
        torch.cuda.CUDAGraph().capture_begin()
    progress = DeviceProgress(Event)
    assert progress.stalled_since_s(1.0) is None
    assert progress.stalled_since_s(2.0) == 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stall_check_does_not_break_the_capture_of_a_cuda_graph() -> None:
    progress = cuda_progress(torch.device("cuda", 0))
    static = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        looks = threading.Thread(target=progress.stalled_since_s, args=(time.monotonic(),))
        looks.start()
        looks.join()
    graph.replay()
    assert static.sum().item() == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_check_waits_for_every_stream_of_the_device() -> None:
    """A script may run a collective on a stream of its own."""
    done, side = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        done.record()
    assert not done.query()
    Cuda().synchronise()
    assert done.query()


# --- GPUs of workers ---


def test_two_workers_on_the_only_gpu_of_a_host_are_refused_by_name() -> None:
    place = LocalRank(rank=1, world_size=2)
    with pytest.raises(InvalidSpec, match="too few GPUs for its workers") as refused:
        place.check(0, 1, {})
    assert refused.value.seen == "2 workers, 1 GPU"
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in refused.value.fix
    with pytest.raises(InvalidSpec, match="too few GPUs for its workers"):
        place.check(0, 1, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    place.check(0, 1, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    # The process that started the worker made only the worker's GPU visible.
    place.check(0, 1, {"CUDA_VISIBLE_DEVICES": "1"})
    LocalRank().check(0, 1, {})


def test_ranks_that_share_a_gpu_are_refused_unless_the_environment_allows_it() -> None:
    check_unshared(["a", "b"], {})
    with pytest.raises(InvalidSpec, match="several members train on one GPU") as refused:
        check_unshared(["a", "b", "a"], {})
    assert refused.value.seen == "ranks 0, 2 on GPU a"
    check_unshared(["a", "a"], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})


def test_members_that_share_a_gpu_are_all_refused(tmp_path: Path) -> None:
    """NCCL's own error would end each generation in its bring-up, for good."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(nccl_bodies.on_one_gpu, path, rank) for rank in range(2)]
        for rank in crew:
            assert rank.expect("refused")["seen"] == "ranks 0, 1 on GPU GPU-0"
            assert rank.join() == 0


# --- numbers of half precision ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_values_count_as_finite_though_their_sum_overflows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are not checked a second time: on a GPU that is a wait for each tensor."""

    def exact(*_: Any) -> Any:
        raise AssertionError("the exact test")

    gradients = torch.full((4096,), 60000.0, dtype=dtype)
    monkeypatch.setattr("shoal.model.gradients.is_on_host", lambda _: False)
    monkeypatch.setattr("torch.isfinite", exact)
    assert are_finite([gradients])
    assert is_finite(gradients)
    monkeypatch.undo()
    gradients[7] = torch.inf
    assert not is_finite(gradients)
