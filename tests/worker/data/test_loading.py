"""Batches that a DataLoader's processes load ahead, and the errors if such a process fails."""

import multiprocessing
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.members.elastic_schedule import Schedule
from support.processes.ranks import Ranks
from support.processes.served_process import awaited
from support.training import loading_bodies
from support.training.loading_bodies import Augmented, LoadingRun
from torch.utils.data import Dataset, default_collate

from shoal.data.batches import Loader
from shoal.data.loading import Loading
from shoal.data.order import Order
from shoal.data.samples import FailedSample
from shoal.torch_private.dataloader import ended_processes_of
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, LoadingFailed, SampleFailed

# The timeout soon reports a process that hangs.
pytestmark = pytest.mark.timeout(60)

TOLERANCE = 1e-6
ENDS_S = 30.0


class Drawn(Dataset[Any]):
    """Samples made of their index and a number from each of three generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        return index, [torch.rand(()).item(), random.random(), float(np.random.rand())]


class Failing(Drawn):
    """A dataset in which the code of one sample raises."""

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        if index == 7:
            raise KeyError("no such picture")
        return super().__getitem__(index)


class Away(Drawn):
    """A dataset in which the storage of one sample does not answer."""

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        if index == 7:
            raise TimeoutError("the storage does not answer")
        return super().__getitem__(index)


class Killed(Drawn):
    """A dataset of which one sample kills the process that loads it."""

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def order(**changes: Any) -> Order:
    return Order(
        **{"num_samples": 23, "global_batch_size": 5, "num_epochs": 3, "seed": 4} | changes
    )


@contextmanager
def loader_of(
    dataset: Any, num_workers: int, collate: Any = None, **options: Any
) -> Iterator[Loader]:
    loading = Loading(num_workers=num_workers, **options)
    loader = Loader(dataset, order(), collate, loading=loading)
    try:
        yield loader
    finally:
        loader.close()


def taken(loader: Loader, world_sizes: list[int]) -> list[Any]:
    """Take all samples of each step, with the random numbers of each; each step is cut for its own
    world size."""
    steps = []
    for step, world_size in enumerate(world_sizes):
        shares = [loader.synchronous(step, rank, world_size) for rank in range(world_size)]
        steps.append(
            [
                (int(index), *(float(column[row]) for column in share.targets))
                for share in shares
                for row, index in enumerate(share.inputs[: len(share.indices)])
            ]
        )
    return steps


@pytest.mark.long
def test_random_numbers_of_a_sample_are_the_same_whichever_process_loads_it() -> None:
    """Holds on one member or three, in the trainer's process or others, for the first time or
    again."""
    with loader_of(Drawn(), 0) as alone, loader_of(Drawn(), 2) as ahead:
        expected = taken(alone, [1] * 15)
        assert taken(ahead, [1] * 15) == expected
        assert taken(ahead, [3, 3, 2, 2, 1, 1, 3, 1, 2, 3]) == expected[:10]
        assert taken(ahead, [2, 2]) == expected[:2]
    by_index = [
        {one[0]: one[1:] for step in expected[first : first + 5] for one in step}
        for first in (0, 5, 10)
    ]
    assert all(set(epoch) == set(range(23)) for epoch in by_index)
    # Another epoch, other random numbers.
    assert by_index[0][3] != by_index[1][3]


def test_loading_processes_are_forked_though_pythons_default_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default from Python 3.14 on is forkserver, to which this dataset could not be sent."""
    methods = multiprocessing.context._default_context
    forkserver = multiprocessing.context._concrete_contexts["forkserver"]
    monkeypatch.setattr(methods, "_default_context", forkserver)
    monkeypatch.setattr(methods, "_actual_context", None)
    monkeypatch.setattr(
        multiprocessing, "get_all_start_methods", lambda: ["forkserver", "spawn", "fork"]
    )

    class OfAFunction(Drawn):
        """A dataset of a class that cannot be imported."""

    with loader_of(OfAFunction(), 1) as loader:
        assert len(taken(loader, [1, 1])) == 2


def seed_all() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def draw() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_loading_leaves_the_trainers_random_generators_unchanged() -> None:
    with loader_of(Drawn(), 0) as alone, loader_of(Drawn(), 1) as ahead:
        for loader in (alone, ahead):
            seed_all()
            loader.synchronous(0, 0, 1)
            found = draw()
            seed_all()
            assert found == draw()


def test_a_share_that_collate_empties_is_reported_with_its_samples() -> None:
    """The error has the step and the samples, not only an index that is out of range."""
    order = Order(num_samples=12, global_batch_size=6, shuffle=False)

    def sound(samples: list[int]) -> Any:
        return default_collate([each for each in samples if each < 9])

    loader = Loader(list(range(12)), order, sound)  # type: ignore[arg-type]
    assert loader.synchronous(1, 0, 2).indices == [6, 7, 8]
    with pytest.raises(SampleFailed, match=r"step 1 .*IndexError.* samples 9, 10, 11;") as raised:
        loader.synchronous(1, 1, 2)
    assert "before session.batches" in raised.value.fix
    assert "in sound" in "".join(raised.value.__notes__)


@pytest.mark.sampled()
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "error"),
    [(Failing(), SampleFailed), (Away(), LoadingFailed)],
    ids=["code", "storage"],
)
def test_a_sample_that_cannot_be_loaded_is_named(
    dataset: Any, error: type[Exception], num_workers: int
) -> None:
    """The error has the dataset's own error and traceback; earlier batches are delivered."""
    with loader_of(dataset, num_workers) as loader:
        with pytest.raises(
            error, match=r"sample 7 could not be loaded.*(picture|answer)"
        ) as raised:
            taken(loader, [1] * 5)
        assert raised.value.details["index"] == "7"  # type: ignore[attr-defined]
        assert "in __getitem__" in "".join(raised.value.__notes__)


@pytest.mark.long
def test_a_loading_process_that_a_sample_kills_is_reported() -> None:
    ended = pytest.raises(LoadingFailed, match="a process that loads batches has ended")
    with loader_of(Killed(), 2) as loader, ended:
        taken(loader, [1] * 5)


@pytest.mark.long
def test_a_process_that_is_killed_while_the_trainer_computes_is_started_again() -> None:
    """The trainer sees no error, and its batches are the same."""
    with loader_of(Drawn(), 0) as alone, loader_of(Drawn(), 2) as ahead:
        expected, others = taken(alone, [1] * 8), _children()
        found = taken(ahead, [1] * 3)
        killed = _children() - others
        assert len(killed) == 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
            # Ended: a zombie, or reaped already.
            awaited(lambda pid=pid: _is_dead(pid), ENDS_S, f"{pid} is dead")
        found += [_one(ahead, step) for step in range(3, 8)]
        assert found == expected
        assert not killed & _children()
        assert len(_children() - others) == 2


def test_a_killed_process_counts_as_ended_before_it_can_be_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of a killed process are closed before it can be reaped: the trainer may find its
    connection closed at that moment."""
    with loader_of(Drawn(), 2) as loader:
        taken(loader, [1])
        assert loader._samples is not None
        iterator = loader._samples._iterator
        killed, alive = iterator._workers
        with monkeypatch.context() as patch:
            patch.setattr(type(killed), "is_alive", lambda self: True)
            killed.kill()
            assert ended_processes_of(iterator, ENDS_S) == [killed.pid]
        assert alive.is_alive()


def test_batches_end_although_a_killed_process_held_their_lock() -> None:
    """Each process takes, for a moment, the lock of the event that asks processes to end. A process
    killed in that moment never releases it."""
    with loader_of(Drawn(), 2) as loader:
        taken(loader, [1])
        assert loader._samples is not None
        iterator = loader._samples._iterator
        iterator._workers_done_event._cond.acquire()
        loader.close()
        assert not any(each.is_alive() for each in iterator._workers)


def _children() -> set[int]:
    """Return the processes that this one has started by multiprocessing, and that run."""
    return {each.pid for each in multiprocessing.active_children() if each.pid is not None}


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _one(loader: Loader, step: int) -> Any:
    batch = loader.synchronous(step, 0, 1)
    columns = batch.targets
    return [
        (int(index), *(float(column[row]) for column in columns))
        for row, index in enumerate(batch.inputs)
    ]


@pytest.mark.long
def test_processes_end_with_the_batches_and_with_each_epoch_if_they_are_not_kept() -> None:
    for kept in (True, False):
        others = _children()
        with loader_of(Drawn(), 2, persistent_workers=kept) as loader:
            loader.start()
            started = _children() - others
            pids = []
            for step in (0, 4, 5):
                loader.synchronous(step, 0, 1)
                pids.append(_children() - others)
        assert len(pids[0]) == 2
        assert pids[0] == started, "the first batch does not start them again"
        assert pids[0] == pids[1]
        assert (pids[2] == pids[0]) == kept
        for pid in {pid for each in pids for pid in each}:
            awaited(lambda pid=pid: not Path(f"/proc/{pid}").exists(), ENDS_S, f"{pid} ends")


def test_a_dataset_that_changes_its_length_is_refused() -> None:
    values: list[int] = list(range(23))
    loader = Loader(values, order())
    loader.synchronous(4, 0, 1)
    values.pop()
    with pytest.raises(InvalidSpec, match=r"another length.*saw 22 samples.*expected 23 samples"):
        loader.synchronous(5, 0, 1)


@pytest.mark.long
def test_closing_does_not_wait_for_batches_loaded_ahead() -> None:
    """A loader that was closed, even twice, can be used again."""
    with loader_of(Drawn(), 2, prefetch_factor=8) as loader:
        loader.synchronous(0, 0, 1)
        loader.close()
        loader.close()
        assert loader.synchronous(1, 0, 1).indices


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_a_job_of_loaded_batches_is_exact_over_a_kill_and_a_join(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The random numbers of samples are those of one process; the killed member's processes end."""
    run = LoadingRun(
        coordinator=cluster.coordinator,
        job=f"loaded-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        desired_members=2,
        batch_size=24,
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5, body=loading_bodies.train)
        schedule.start(2)
        schedule.kill()
        schedule.join()
        finished = schedule.finish()
        loads = {
            pid
            for rank in schedule.all
            for kind, data in rank.seen
            if kind == "tried"
            for pid in data["loads"]
        }
    expected = loading_bodies.one_process(run, finished["step"])
    for name, weights in expected.items():
        found = torch.tensor(finished["weights"][name])
        assert torch.allclose(found, torch.tensor(weights), rtol=0, atol=TOLERANCE), name
    assert len(loads) >= 6
    for pid in loads:
        awaited(lambda pid=pid: not Path(f"/proc/{pid}").exists(), ENDS_S, f"{pid} ends")


def test_the_samples_of_the_jobs_dataset_are_random() -> None:
    """The test of the job needs samples that differ each time."""
    augmented = Augmented()
    assert not torch.equal(augmented[0][0], augmented[0][0])


class Stopped(Drawn):
    """A dataset of which one sample stops the process that loads it (SIGSTOP)."""

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        if index == 7:
            signal.raise_signal(signal.SIGSTOP)
        return super().__getitem__(index)


class Slow(Drawn):
    """Samples that each sleep for 0.4 s."""

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        time.sleep(0.4)
        return super().__getitem__(index)


class Unsendable(Drawn):
    """Samples that raise `error` when they are pickled for another process."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, index: int) -> Any:
        return _Raises(self._error)


class _Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        raise self._error


class Lacking(Drawn):
    """Samples that raise `error`, as if memory were exhausted."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        raise self._error


def take_all(loader: Loader) -> int:
    return sum(len(loader.synchronous(step, 0, 1).indices) for step in range(5))


@pytest.mark.long
def test_a_silent_loading_process_is_reported() -> None:
    """The process is stopped by SIGSTOP."""
    with (
        loader_of(Stopped(), 1, silence_s=2.0) as loader,
        pytest.raises(LoadingFailed, match=r"no sample was begun.*silence_s"),
    ):
        take_all(loader)


@pytest.mark.long
def test_slow_samples_do_not_count_as_silence() -> None:
    with loader_of(Slow(), 1, silence_s=1.5, prefetch_factor=1) as loader:
        assert take_all(loader) == 23


def test_the_timeout_of_a_batch_applies_to_processes_that_are_not_silent() -> None:
    with (
        loader_of(Slow(), 1, timeout=1.0, prefetch_factor=1) as loader,
        pytest.raises(LoadingFailed, match="timed out after 1 seconds"),
    ):
        take_all(loader)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("AF_UNIX path too long"), LoadingFailed),
        (OSError(28, "No space left on device"), LoadingFailed),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_1>"), LoadingFailed),
        (TypeError("cannot pickle this"), SampleFailed),
    ],
)
def test_a_batch_that_cannot_be_sent_is_reported_at_once(
    error: Exception, kind: type[Exception]
) -> None:
    """A thread of multiprocessing gets the error, and only prints it."""
    with (
        loader_of(Unsendable(error), 1, collate=list) as loader,
        pytest.raises(
            kind, match=r"could not be sent to the trainer|saw TypeError: cannot pickle this"
        ),
    ):
        take_all(loader)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        OSError(24, "Too many open files"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_lack_of_memory_is_not_reported_as_an_error_of_the_dataset(
    error: Exception, num_workers: int
) -> None:
    with (
        loader_of(Lacking(error), num_workers) as loader,
        pytest.raises(LoadingFailed, match=r"/dev/shm.*fewer num_workers|fewer num_workers"),
    ):
        take_all(loader)


def test_a_full_device_at_the_start_of_processes_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", full)
    with (
        loader_of(Drawn(), 1) as loader,
        pytest.raises(LoadingFailed, match=r"could not be started.*fewer num_workers"),
    ):
        loader.start()


def test_a_runtime_error_of_the_dataset_is_reported_as_the_datasets() -> None:
    failed = FailedSample.of(RuntimeError("a label is out of range"), 3).raised()
    assert isinstance(failed, SampleFailed)


LONG = """
import sys, torch
from torch.utils.data import TensorDataset
import shoal
model = torch.nn.Linear(2, 1)
if __name__ == "__main__":
    with shoal.join() as session:
        model, _ = session.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
        context = sys.argv[1]
        for batch in session.batches(
            data, global_batch_size=4, num_workers=1, multiprocessing_context=context
        ):
            with session.step():
                session.backward((model(batch.inputs) - batch.targets).square().mean())
    print("trained", session.step_number)
"""
HANGS = """
import signal, torch
import shoal
class Stopped(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        print("stops", flush=True)
        signal.raise_signal(signal.SIGSTOP)
model = torch.nn.Linear(2, 1)
with shoal.join() as session:
    model, _ = session.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in session.batches(Stopped(), global_batch_size=4, num_workers=1):
        pass
"""


def environment(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    return {**own, **more}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_batches_are_loaded_though_tmpdir_is_too_long_for_sockets(
    tmp_path: Path, context: str
) -> None:
    """multiprocessing's sockets are put elsewhere: a socket's path has at most 107 bytes."""
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    script = tmp_path / "train.py"
    script.write_text(LONG)
    before = set(Path("/tmp").glob("pymp-*"))
    done = subprocess.run(
        [sys.executable, str(script), context],
        env=environment(TMPDIR=str(directory)),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "trained 2" in done.stdout, done.stderr
    left = set(Path("/tmp").glob("pymp-*")) - before
    assert not any(list(each.iterdir()) for each in left)


@pytest.mark.long
def test_a_drain_does_not_wait_for_a_batch_that_never_comes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "stops\n" in process.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.communicate()
