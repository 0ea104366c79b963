"""Settings of a DataLoader that a session adopts, and settings that are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from shoal.data.batch_options import BatchOptions, fields_of
from shoal.data.order import Order
from shoal_proto.errors import InvalidSpec

DATASET = TensorDataset(torch.arange(10))


def options(**given: Any) -> BatchOptions:
    named: dict[str, Any] = {
        name: given.pop(name, default)
        for name, default in (
            ("global_batch_size", None),
            ("epochs", 1),
            ("seed", None),
            ("shuffle", None),
            ("collate", None),
        )
    }
    return BatchOptions.of(**named, options=given)  # type: ignore[arg-type]


def order_of(dataset: Any, **given: Any) -> Order:
    return options(**given).loader(dataset).order


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATASET, 4), {"shuffle": False, "seed": 0, "drop_last": False}),
        (DataLoader(DATASET, 4, shuffle=True), {"shuffle": True, "seed": 0}),
        (DataLoader(DATASET, 4, drop_last=True), {"drop_last": True}),
        (
            DataLoader(DATASET, 4, shuffle=True, generator=torch.Generator().manual_seed(9)),
            {"shuffle": True, "seed": 9},
        ),
        (
            DataLoader(
                DATASET,
                4,
                sampler=RandomSampler(DATASET, generator=torch.Generator().manual_seed(9)),
                generator=torch.Generator().manual_seed(5),
            ),
            {"shuffle": True, "seed": 9},
        ),
        (
            DataLoader(DATASET, 4, sampler=DistributedSampler(DATASET, 1, 0, seed=3)),
            {"shuffle": True, "seed": 3},
        ),
    ],
    ids=["plain", "shuffled", "drop_last", "generator", "RandomSampler", "DistributedSampler"],
)
def test_settings_that_the_call_leaves_out_are_those_of_the_data_loader(
    loader: DataLoader[Any], expected: dict[str, Any]
) -> None:
    """The loader's batch size is the global one; arguments of the call take precedence."""
    found = order_of(loader)
    assert (found.num_samples, found.global_batch_size) == (10, 4)
    assert {name: getattr(found, name) for name in expected} == expected
    order = order_of(loader, global_batch_size=2, shuffle=True, seed=7, epochs=3)
    assert (order.global_batch_size, order.shuffle, order.seed, order.num_epochs) == (2, True, 7, 3)


def test_the_batch_size_of_one_process_of_several_is_refused() -> None:
    """The script would train with a third of its batch."""
    loader = DataLoader(DATASET, 4, sampler=DistributedSampler(DATASET, 3, 1, seed=3))
    with pytest.raises(InvalidSpec, match=r"batch_size=4 of each of 3.*global_batch_size=12"):
        order_of(loader)
    found = order_of(loader, global_batch_size=12)
    assert (found.global_batch_size, found.shuffle, found.seed) == (12, True, 3)


def test_a_tuple_of_tensors_is_loaded_by_processes_as_it_is_without() -> None:
    tensors = torch.arange(10), torch.arange(10) * 2
    shares = []
    for num_workers in (0, 1):
        loader = options(global_batch_size=4, num_workers=num_workers).loader(tensors)
        shares.append(loader.synchronous(1, 0, 1))
        loader.close()
    plain, loaded = shares
    assert torch.equal(plain.inputs, loaded.inputs)
    assert torch.equal(plain.targets, loaded.targets)


@pytest.mark.parametrize(
    ("dataset", "seen"),
    [
        ((np.zeros(10), np.zeros(10)), "ndarray, ndarray"),
        (([1, 2], [3, 4]), "list, list"),
        ((), "nothing"),
    ],
    ids=["arrays", "lists", "empty"],
)
def test_a_tuple_of_other_things_than_tensors_is_no_dataset(dataset: Any, seen: str) -> None:
    """The tuple would otherwise be a dataset with as many samples as it has parts."""
    with pytest.raises(InvalidSpec, match=f"something other than tensors; saw {seen};"):
        order_of(dataset, global_batch_size=2)


def test_an_order_that_was_drawn_is_kept() -> None:
    """Follows docs/data.md: the order of a weighted sampler, and of one that makes batches."""
    generator = torch.Generator().manual_seed(0)
    weighted = list(WeightedRandomSampler(torch.rand(10).tolist(), 30, generator=generator))
    batches = [[7, 2, 9, 4], [4, 1, 0, 3], [8, 5, 6]]
    for drawn in (weighted, [index for indices in batches for index in indices]):
        subset: Subset[Any] = Subset(DATASET, drawn)
        order = order_of(subset, global_batch_size=4, epochs=1, shuffle=False)
        found = [int(subset[at][0]) for at in order.indices(0, 0, len(drawn)).tolist()]
        assert (order.num_epochs, found) == (1, drawn)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


class Halves(DistributedSampler[Any]):
    """A sampler that draws one half of the samples."""

    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (
            DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 4, True)),
            "saw BatchS",
        ),
        (DataLoader(DATASET, None), "batch_sampler"),
        (DataLoader(DATASET, 4, sampler=WeightedRandomSampler([1.0] * 10, 10)), "Weighted"),
        (DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, True)), "RandomSampler of 10"),
        (DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, num_samples=5)), "of 5 samples"),
        (DataLoader(DATASET, 4, sampler=[3, 1]), "list"),
        (DataLoader(Stream(), 4), "saw Stream"),
        (DataLoader(DATASET, 4, sampler=Halves(DATASET, 1, 0)), "saw Halves"),
        (
            DataLoader(DATASET, 4, sampler=DistributedSampler(Subset(DATASET, [3]), 1, 0)),
            "DistributedSampler of 1 samples; expected a sampler of all 10 samples",
        ),
        (DataLoader(DATASET, 4, sampler=RandomSampler(range(5))), "RandomSampler of 5 samples"),
        (DataLoader(DATASET, 4, sampler=SequentialSampler(range(5))), "SequentialSampler of 5 s"),
    ],
    ids=[
        *("batch_sampler", "no batches", "weighted", "replacement", "a part", "list", "iterable"),
        *("subclass", "distributed part", "random part", "first part"),
    ],
)
def test_loaders_that_choose_their_own_samples_are_refused(
    loader: DataLoader[Any], words: str
) -> None:
    with pytest.raises(InvalidSpec, match=words) as refused:
        order_of(loader)
    assert "order of your own" in str(refused.value).lower() or isinstance(loader.dataset, Stream)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"global_batch_size": 4, "num_wrkers": 2}, "has no option num_wrkers.*num_workers"),
        ({"batch_size": 4}, "has no option batch_size.*global_batch_size"),
        ({"global_batch_size": 4, "epochs": 2.5}, "^epochs is not an integer; saw 2.5"),
        ({"global_batch_size": 4, "num_workers": -1}, "num_workers.*saw -1"),
        ({"global_batch_size": 4, "prefetch_factor": 2}, "prefetch_factor.*num_workers=0"),
        ({"global_batch_size": 4, "collate": list, "collate_fn": list}, "both are given"),
        ({"global_batch_size": 11, "drop_last": True}, "leaves out every sample"),
        ({}, "the number of samples in a step is not given"),
        ({"global_batch_size": 4.0}, "global_batch_size is not an integer; saw 4.0"),
        ({"global_batch_size": 4, "seed": 1.5}, "seed is not an integer; saw 1.5"),
        ({"global_batch_size": 4, "num_workers": "2"}, "num_workers is not an integer; saw '2'"),
        ({"global_batch_size": 4, "num_workers": 1, "timeout": -1}, "timeout.*saw -1"),
    ],
    ids=[
        *(
            "unknown",
            "batch size",
            "part of an epoch",
            "negative",
            "prefetch",
            "collate twice",
            "nothing left",
            "no size",
        ),
        *("size", "seed", "processes", "timeout"),
    ],
)
def test_contradictions_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        order_of(DATASET, **given)


def test_a_batch_size_of_0_is_not_replaced_by_the_data_loaders() -> None:
    with pytest.raises(InvalidSpec, match="global_batch_size is out of range; saw 0"):
        order_of(DataLoader(DATASET, 4), global_batch_size=0)


def test_default_settings_add_no_field_to_the_proposal() -> None:
    order = order_of(DATASET, global_batch_size=4)
    assert set(fields_of(DATASET, order)) == {
        "global_batch",
        "dataset",
        "seed",
        "epochs",
        "shuffle",
    }
    assert "drop_last" in fields_of(DATASET, order_of(DATASET, global_batch_size=4, drop_last=True))
    large = Order(num_samples=(1 << 20) + 1, global_batch_size=4)
    assert fields_of(DATASET, large)["order"] == "2"
    assert "order" not in fields_of(DATASET, Order(num_samples=1 << 20, global_batch_size=4))
