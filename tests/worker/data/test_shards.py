"""Data sets in shards: each sample comes once an epoch, and little is read in vain."""

import io
import pickle
import secrets
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.members.elastic_schedule import Schedule, check_each_sample_once, lose_all
from support.processes.ranks import Ranks
from support.training import shard_bodies
from support.training.shard_bodies import LENGTHS, ShardRun, Stream, loader_of, streams
from torch.utils.data import DataLoader

import shoal
from shoal.data.batch_options import BatchOptions, fields_of
from shoal.data.batches import Loader
from shoal.data.loading import Loading
from shoal.data.order import Order
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, SampleFailed

TOLERANCE = 1e-6
MAX_MARGIN_STEPS = 2000
"""Limit of the stop's margin: more steps than by default, as float64 rounds little."""


class Counted:
    """Shards of consecutive numbers from 0 on; counts what is read of them."""

    def __init__(self, lengths: list[int], **options: Any) -> None:
        self.num_opened: Counter[int] = Counter()
        self.num_read = 0
        stops = torch.tensor(lengths).cumsum(0).tolist()
        shards = list(zip([0, *stops], stops, strict=False))
        self.dataset = shoal.Shards(shards, lengths=lengths, read=self.read, **options)

    def read(self, shard: tuple[int, int]) -> Iterator[int]:
        self.num_opened[shard[0]] += 1
        for number in range(*shard):
            self.num_read += 1
            yield number

    def loader(self, **changes: Any) -> Loader:
        return loading(self.dataset, **changes)


@dataclass(frozen=True, eq=False)
class Numbered:
    """A sample whose memory can be watched."""

    number: int


def loading(dataset: Any, *, together: bool = True, **changes: Any) -> Loader:
    defaults = {"global_batch_size": 8, "epochs": 2, "seed": 5, "shuffle": None, "collate": None}
    options = {name: changes.pop(name) for name in list(changes) if name not in defaults}
    made = BatchOptions.of(**{**defaults, **changes}, options=options)  # type: ignore[arg-type]
    return made.loader(dataset, together=together)


lengths_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any)


streams_of_shards = st.fixed_dictionaries(
    {
        "columns": st.integers(1, 5),
        "turns": st.integers(1, 4),
        "shuffle_buffer": st.integers(1, 12),
    }
)


@pytest.mark.long
@settings(max_examples=40)
@given(
    lengths_of_shards,
    streams_of_shards,
    st.integers(1, 40),
    st.lists(st.integers(1, 7), min_size=1, max_size=9),
)
def test_each_sample_comes_once_an_epoch_over_all_changes_of_members(
    lengths: list[int], options: dict[str, int], batch_size: int, world_sizes: list[int]
) -> None:
    """Indices name the samples that are delivered."""
    counted = Counted(lengths, **options)
    loader = counted.loader(global_batch_size=batch_size)
    seen: dict[int, list[int]] = {}
    for step in range(loader.order.num_steps):
        world_size = world_sizes[step % len(world_sizes)]
        for rank in range(world_size):
            batch = loader.synchronous(step, rank, world_size)
            seen.setdefault(batch.epoch, []).extend(batch.indices)
            if batch.indices:
                assert batch.inputs.tolist() == batch.indices
    assert [sorted(indices) for indices in seen.values()] == [list(range(sum(lengths)))] * 2
    # With two shards and little mixing, two epochs have the same order half of the time.
    if sum(lengths) > 40 and options["shuffle_buffer"] > 4:
        assert seen[0] != seen[1]


@pytest.mark.long
@settings(max_examples=40)
@given(lengths_of_shards, st.integers(1, 12), st.integers(1, 40))
def test_members_at_their_own_pace_get_each_sample_once_from_any_ranges(
    lengths: list[int], buffer: int, batch_size: int
) -> None:
    loader = Counted(lengths, shuffle_buffer=buffer).loader(
        global_batch_size=batch_size, together=False
    )
    starts = range(0, sum(lengths), batch_size)
    taken = [
        index
        for start in reversed(starts)
        for index in loader.leased(0, start, min(start + batch_size, sum(lengths)), 0).indices
    ]
    assert sorted(taken) == list(range(sum(lengths)))


@pytest.mark.long
def test_members_and_processes_read_streams_of_their_own() -> None:
    """Streams have 4 columns and 2 turns here: one of two members reads half of the samples. A
    member that loads every second batch reads a quarter, except for samples at the borders of
    streams."""
    lengths = [100] * 32
    read: list[int] = []
    for num_members, stride in ((1, 1), (2, 1), (4, 2)):
        counted = Counted(lengths, columns=4, turns=2, shuffle_buffer=16)
        loader = counted.loader(global_batch_size=16, epochs=1)
        for step in range(0, loader.order.num_steps, stride):
            loader.synchronous(step, 0, num_members)
        read.append(counted.num_read)
    assert 3200 <= read[0] <= 3200 + 8 * 100
    assert 1600 <= read[1] <= 1600 + 4 * 100 + 4 * 16
    assert 400 <= read[2] <= 400 + 100 + 2 * 16


def test_members_at_their_own_pace_walk_through_one_shard_after_the_other() -> None:
    counted = Counted([50] * 8, shuffle_buffer=16)
    loader = counted.loader(global_batch_size=10, together=False, epochs=1)
    for start in range(0, 400, 10):
        loader.leased(0, start, start + 10, 0)
    assert set(counted.num_opened.values()) == {1}
    assert counted.num_read == 400


def test_a_step_that_is_taken_again_is_not_read_again() -> None:
    counted = Counted([40] * 6, columns=2, shuffle_buffer=8)
    loader = counted.loader()
    first = [loader.synchronous(step, 0, 1).inputs.tolist() for step in range(10)]
    num_read = counted.num_read
    assert [loader.synchronous(step, 0, 1).inputs.tolist() for step in (8, 9)] == first[8:]
    assert counted.num_read == num_read
    # A much earlier step is read again, and gives the same samples.
    assert loader.synchronous(0, 0, 1).inputs.tolist() == first[0]
    assert counted.num_read > num_read


def test_reading_past_samples_keeps_few_of_them() -> None:
    alive: WeakSet[Numbered] = WeakSet()
    num_opened = 0

    def read(shard: range) -> Iterator[Numbered]:
        nonlocal num_opened
        num_opened += 1
        for number in shard:
            sample = Numbered(number)
            alive.add(sample)
            yield sample

    options: dict[str, Any] = {"read": read, "columns": 1, "shuffle_buffer": 8}
    shards = shoal.Shards([range(10_000)], lengths=[10_000], **options)
    assert shards[9_000].number == 9_000
    assert len(alive) == 16
    assert shards[8_990].number == 8_990
    assert num_opened == 1


def centred(sample: Any) -> Any:
    """Change a sample in place, as a `decode` may."""
    values, _ = sample if isinstance(sample, tuple) else (sample["values"], 0)
    values -= 1
    return values.tolist()


class Opened(dict[str, Any]):
    """A sample that cannot be copied, as one with an open file."""

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("cannot pickle")


@pytest.mark.parametrize(
    "make",
    [
        lambda number: (np.full(2, number), number),
        lambda number: {"values": torch.full((2,), number)},
        lambda number: Opened(values=np.full(2, number)),
    ],
    ids=["arrays", "tensors", "not copied"],
)
def test_a_decode_in_place_changes_no_kept_sample(make: Callable[[int], Any]) -> None:
    """Regression: a sample that was requested again had the changes of the first time."""
    options: dict[str, Any] = {"read": lambda shard: map(make, shard), "decode": centred}
    shards = shoal.Shards([range(10)], lengths=[10], **options)
    assert [shards[index] for index in (3, 3, 5, 3)] == [[2, 2], [2, 2], [4, 4], [2, 2]]


@pytest.mark.parametrize(("count", "seen"), [(5, "saw more samples"), (7, "saw 6 samples")])
def test_a_shard_of_another_length_is_refused_by_name(count: int, seen: str) -> None:
    """A longer shard is refused too: its other samples would never be trained on."""
    shards = shoal.Shards([range(6), range(2)], lengths=[count, 2])
    loader = loading(shards, global_batch_size=count + 2)
    with pytest.raises(SampleFailed, match=rf"shard 0 has another number.*{seen}.*ected {count}"):
        loader.synchronous(0, 0, 1)
    assert shoal.Shards.count([range(6), range(2)]) == [6, 2]


@pytest.mark.parametrize(
    ("shards", "options", "words"),
    [
        ([range(3)], {"lengths": []}, "1 shards, 0 lengths.*Shards.count"),
        ([range(3)], {"lengths": [0]}, "hold no samples"),
        ([range(3)], {"lengths": [2.5]}, "a length of shards is not an integer; saw 2.5"),
        ([range(3)], {"lengths": [3], "columns": 0}, "columns of shards .*saw 0"),
        ([range(3)], {"lengths": [3], "turns": -1}, "turns of shards .*saw -1"),
        ([range(3)], {"lengths": [3], "shuffle_buffer": 0}, "shuffle_buffer of shards"),
    ],
    ids=["no length", "empty", "half", "columns", "turns", "buffer"],
)
def test_bad_shards_are_refused(shards: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        shoal.Shards(shards, **options)


def test_the_refusal_of_an_iterable_data_set_explains_shards() -> None:
    for dataset in (Stream(0, 5), DataLoader(Stream(0, 5), 2)):
        with pytest.raises(InvalidSpec, match=r"saw Stream.*shoal\.Shards\(\[dataset\], lengths="):
            loading(dataset)


def test_settings_that_decide_the_order_are_fields_that_members_compare() -> None:
    """Members compare these fields, and so does a job that continues from a checkpoint."""
    found = fields_of(streams(), loader_of(24).order)
    assert found["dataset"].startswith("101 samples in 7 shards ")
    assert found["order"] == "3: 3 columns, 2 turns, window 8, batches of 24"
    other = shoal.Shards(streams().shards, lengths=[*LENGTHS[:-2], 24, 18])
    assert fields_of(other, loading(other).order)["dataset"] != found["dataset"]


@pytest.mark.parametrize("kind", [str, Path])
def test_the_order_of_paths_is_compared_and_the_folder_of_all_is_not(
    kind: Callable[[str], Any],
) -> None:
    """Hosts may keep the data in different folders, but members must number the shards alike."""

    def description(*names: str) -> str:
        return shoal.Shards([kind(name) for name in names], lengths=[3, 3]).description

    expected = description("/here/data/a/0.tar", "/here/data/b/0.tar")
    assert description("/there/a/0.tar", "/there/b/0.tar") == expected
    assert description("a/0.tar", "b/0.tar") == expected
    assert description("/here/data/b/0.tar", "/here/data/a/0.tar") != expected
    assert description("/here/data/a/0.tar", "/here/data/b/1.tar") != expected


def test_without_shuffling_samples_come_in_the_given_order() -> None:
    loader = Counted([3, 4], columns=2).loader(shuffle=False, global_batch_size=7)
    assert loader.synchronous(0, 0, 1).inputs.tolist() == list(range(7))


def test_shards_are_a_map_style_data_set_too() -> None:
    shards = shoal.Shards([range(4), range(4, 6)], lengths=[4, 2], decode=lambda n: n * 2)
    assert [batch.tolist() for batch in DataLoader(shards, 4)] == [[0, 2, 4, 6], [8, 10]]
    with pytest.raises(IndexError):
        shards[6]


@pytest.mark.long
def test_processes_that_load_read_all_samples_and_draw_as_the_trainer_does() -> None:
    """The iterable data sets themselves would divide their samples among processes, and use random
    numbers."""

    def steps(num_workers: int) -> list[list[float]]:
        loader = Loader(streams(), order, loading=Loading(num_workers=num_workers))
        try:
            return [loader.synchronous(step, 0, 1).inputs.flatten().tolist() for step in range(10)]
        finally:
            loader.close()

    order: Order = loader_of(24).order
    torch.manual_seed(1)
    before = torch.get_rng_state()
    alone = steps(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert steps(2) == alone


def test_shards_can_be_pickled_while_one_is_open() -> None:
    shards = shoal.Shards([range(4)], lengths=[4])
    assert shards[2] == 2
    assert pickle.loads(pickle.dumps(shards))[1] == 1


def write_tar(url: str, samples: dict[str, dict[str, bytes]]) -> None:
    with fsspec.open(url, "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for key, parts in samples.items():
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("kind", ["path", "URL"])
def test_tar_files_are_read_as_web_dataset_lays_them_out(tmp_path: Path, kind: str) -> None:
    place = str(tmp_path) if kind == "path" else f"memory://{secrets.token_hex(4)}"
    urls = [f"{place}/train-{number}.tar" for number in range(2)]
    write_tar(urls[0], {"a/0001": {"cls": b"3", "seg.png": b"x"}, "b/0001": {"CLS": b"4"}})
    write_tar(urls[1], {"0002": {"cls": b"5"}})
    shards = shoal.Shards(urls, lengths=shoal.Shards.count(urls))
    assert [shards[index] for index in range(3)] == [
        {"__key__": "a/0001", "cls": b"3", "seg.png": b"x"},
        {"__key__": "b/0001", "cls": b"4"},
        {"__key__": "0002", "cls": b"5"},
    ]
    with pytest.raises(InvalidSpec, match=r"saw x\.parquet.*read="):
        shoal.Shards(["x.parquet"], lengths=[1])[0]


@pytest.mark.long
def test_a_job_on_shards_is_exact_over_a_kill_and_a_join(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The weights are those of one process, and each sample is taken once an epoch."""
    run = shard_run(cluster, desired_members=2)
    with Ranks() as ranks:
        schedule = schedule_of(ranks, run, tmp_path, seed=7)
        schedule.start(2)
        schedule.kill()
        schedule.join()
        check(schedule, run)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_job_on_shards_is_exact_over_kills_joins_and_drains(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    run = shard_run(cluster, strategy=strategy, desired_members=2)
    with Ranks() as ranks:
        schedule = schedule_of(ranks, run, tmp_path, seed=7)
        schedule.start(2)
        schedule.kill()
        schedule.join()
        schedule.drain()
        schedule.join()
        check(schedule, run)


@pytest.mark.nightly
def test_a_job_on_shards_goes_on_from_its_checkpoint(cluster: LocalCluster, tmp_path: Path) -> None:
    run = shard_run(cluster, checkpoints=str(tmp_path / "kept"), desired_members=2)
    with Ranks() as ranks:
        schedule = schedule_of(ranks, run, tmp_path, seed=8)
        schedule.start(2)
        lose_all(schedule, tmp_path / "kept", num_checkpoints=2)
        again = schedule_of(ranks, run, tmp_path, seed=9)
        again.start(2)
        finished = again.finish()
    check_weights(finished, run)


def shard_run(cluster: LocalCluster, **changes: Any) -> ShardRun:
    return ShardRun(
        coordinator=cluster.coordinator,
        job=f"shards-{secrets.token_hex(4)}",
        member_id="",
        batch_size=24,
        **changes,
    )


def schedule_of(ranks: Ranks, run: ShardRun, directory: Path, seed: int) -> Schedule:
    body = shard_bodies.train
    return Schedule(ranks, run, directory, seed, body, max_margin_steps=MAX_MARGIN_STEPS)


def check(schedule: Schedule, run: ShardRun) -> None:
    finished = schedule.finish()
    check_weights(finished, run)
    for rank in schedule.all:
        rank.drain()
    check_each_sample_once(schedule.all, finished["step"], loader_of(run.batch_size).order)


def check_weights(finished: Any, run: ShardRun) -> None:
    for name, weights in shard_bodies.one_process(run, finished["step"]).items():
        found, expected = (
            torch.tensor(each, dtype=torch.float64) for each in (finished["weights"][name], weights)
        )
        assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), name
