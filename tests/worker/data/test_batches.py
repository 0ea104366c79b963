"""The elastic sampler: order by seed and epoch, shares by the roster, weights that add up."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from shoal.data.batches import Batch, Loader, dataset_size, describe
from shoal.data.loading import Loading
from shoal.data.order import Order, range_of_rank
from shoal.data.parts import cut
from shoal.data.samples import Samples
from shoal_proto.errors import InvalidSpec

orders = st.builds(
    Order,
    num_samples=st.integers(1, 200),
    global_batch_size=st.integers(1, 60),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)


@given(orders, st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_each_sample_comes_once_an_epoch_over_all_changes_of_members(
    order: Order, world_sizes: list[int]
) -> None:
    """The world size changes in each step."""
    loader = Loader((torch.arange(order.num_samples),), order)
    seen: dict[int, list[int]] = {}
    for step in range(order.num_steps):
        world_size = world_sizes[step % len(world_sizes)]
        for rank in range(world_size):
            batch = loader.synchronous(step, rank, world_size)
            seen.setdefault(batch.epoch, []).extend(batch.indices)
    assert list(seen) == list(range(order.num_epochs))
    for indices in seen.values():
        assert sorted(indices) == list(range(order.num_samples))


@given(orders, st.integers(1, 9))
def test_a_steps_samples_do_not_depend_on_the_world_size(order: Order, world_size: int) -> None:
    """The shares of all ranks, in order of rank, make up the batch of one process."""
    loader = Loader((torch.arange(order.num_samples),), order)
    for step in range(min(order.num_steps, 4)):
        alone = loader.synchronous(step, 0, 1).indices
        together = [loader.synchronous(step, rank, world_size) for rank in range(world_size)]
        assert [index for batch in together for index in batch.indices] == alone


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_shares_are_contiguous_and_differ_by_one_at_most(
    start: int, length: int, world_size: int
) -> None:
    """The shares have no gaps between them."""
    shares = [range_of_rank(start, start + length, rank, world_size) for rank in range(world_size)]
    assert shares[0][0] == start
    assert shares[-1][1] == start + length
    assert all(a[1] == b[0] for a, b in pairwise(shares))
    sizes = [stop - first for first, stop in shares]
    assert max(sizes) - min(sizes) <= 1


@given(orders, st.integers(1, 9))
def test_weighted_means_of_the_members_average_to_the_mean_of_the_batch(
    order: Order, world_size: int
) -> None:
    """Holds for uneven shares, and for members without samples: they get one sample of weight 0."""
    values = torch.randn(order.num_samples, dtype=torch.float64)
    loader = Loader((values,), order)
    for step in range(min(order.num_steps, 4)):
        batches = [loader.synchronous(step, rank, world_size) for rank in range(world_size)]
        mean = sum(b.weight * b.inputs.mean() for b in batches) / world_size
        assert torch.allclose(mean, loader.synchronous(step, 0, 1).inputs.mean())
        assert all(len(b.inputs) == max(1, len(b.indices)) for b in batches)


def test_the_order_differs_by_epoch_and_by_seed_and_by_nothing_else() -> None:
    """Two epochs of one seed, and the same epoch of two seeds, have little in common."""
    order = Order(num_samples=1000, global_batch_size=10, num_epochs=2, seed=1)
    other = Order(num_samples=1000, global_batch_size=99, num_epochs=7, seed=1)
    of_epoch = order.indices(1, 0, 1000)
    assert torch.equal(of_epoch, other.indices(1, 0, 1000))
    for different in (
        order.indices(0, 0, 1000),
        Order(num_samples=1000, global_batch_size=10, seed=2).indices(1, 0, 1000),
    ):
        assert int((of_epoch == different).sum()) < 20


class Pairs(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


@pytest.mark.parametrize(
    "dataset",
    [
        (torch.arange(5), torch.arange(5) ** 2),
        TensorDataset(torch.arange(5), torch.arange(5) ** 2),
        Pairs(),
    ],
    ids=["tuple", "TensorDataset", "map-style"],
)
def test_all_kinds_of_datasets_give_the_same_batches(dataset: Any) -> None:
    """Tensors are indexed as a whole; items are collated one by one."""
    order = Order(num_samples=dataset_size(dataset), global_batch_size=3)
    batch = Loader(dataset, order).synchronous(0, 0, 1)
    assert batch.inputs.tolist() == batch.indices
    assert batch.targets.tolist() == [index * index for index in batch.indices]


class Shifted(TensorDataset):
    """The first three rows, with 1 added to each value on access."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] + 1 for tensor in self.tensors)


def test_samples_of_a_subclass_of_tensor_dataset_are_its_own() -> None:
    """Regression: whole tensors were indexed, without the subclass's length and `__getitem__`."""
    dataset = Shifted(torch.arange(5), torch.arange(5))
    order = Order(num_samples=dataset_size(dataset), global_batch_size=3, shuffle=False)
    batch = Loader(dataset, order).synchronous(0, 0, 1)
    assert batch.inputs.tolist() == batch.targets.tolist() == [1, 2, 3]
    assert describe(dataset) == "Shifted of 3"


def test_three_columns_are_two_inputs_and_a_target() -> None:
    """A single column is an input without target."""
    column = torch.arange(4)
    order = Order(num_samples=4, global_batch_size=4, shuffle=False)
    batch = Loader((column, column + 1, column + 2), order).synchronous(0, 0, 1)
    assert [part.tolist() for part in batch.inputs] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert batch.targets.tolist() == [2, 3, 4, 5]
    assert Loader((column,), order).synchronous(0, 0, 1).targets is None


class Described(Dataset[Any]):
    """A dataset whose samples are what `make` returns: dicts, tuples or lists, as in scripts."""

    def __init__(self, make: Callable[[int], Any], *, is_loaded_together: bool = False) -> None:
        self._make = make
        if is_loaded_together:
            self.__getitems__ = lambda indices: list(map(make, indices))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def rows_of(index: int) -> Tensor:
    """A sample of two rows: a list of two such samples looks like two columns."""
    return torch.full((2, 3), float(index))


def as_dict(index: int) -> Any:
    return {"image": rows_of(index)}


def as_pair(index: int) -> Any:
    return rows_of(index), index


def as_list(index: int) -> Any:
    return [rows_of(index), rows_of(index)]


def as_they_are(samples: list[Any]) -> Any:
    return samples


def only_rows(samples: list[Any]) -> Any:
    return [each["image"] for each in samples]


@pytest.mark.sampled()
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", [as_dict, as_pair, as_list])
def test_a_list_of_a_collate_function_is_inputs_whatever_its_length(
    make: Callable[[int], Any], size: int, num_workers: int
) -> None:
    """Regression: the last sample of each share became the targets, and nothing was left of a list
    of one sample."""
    order = Order(num_samples=12, global_batch_size=size, shuffle=False)
    loader = Loader(Described(make), order, as_they_are, loading=Loading(num_workers=num_workers))
    batch = loader.synchronous(1, 0, 1)
    loader.close()
    assert batch.targets is None
    assert str(list(batch.inputs)) == str([make(index) for index in range(size, 2 * size)])


@pytest.mark.sampled()
@pytest.mark.parametrize("is_loaded_together", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_torchs_own_collate_goes_by_the_type_of_a_sample(
    size: int, num_workers: int, is_loaded_together: bool
) -> None:
    """torch makes a list from tuples, whose last part is the target, and from lists, which have
    none."""
    order = Order(num_samples=12, global_batch_size=size, shuffle=False)
    for make, has_targets in ((as_pair, True), (as_list, False)):
        loader = Loader(
            Described(make, is_loaded_together=is_loaded_together),
            order,
            loading=Loading(num_workers=num_workers),
            seed_samples=not is_loaded_together,
        )
        batch = loader.synchronous(0, 0, 1)
        loader.close()
        if has_targets:
            assert batch.inputs.shape == (size, 2, 3)
            assert batch.targets.tolist() == list(range(size))
        else:
            assert [tuple(each.shape) for each in batch.inputs] == [(size, 2, 3)] * 2
            assert batch.targets is None


def test_a_void_batch_of_a_dataset_that_loads_whole_batches_is_not_loaded() -> None:
    """The callback at its beginning is called all the same, as for a single sample."""
    loaded: list[int] = []
    answers = [False]
    dataset = Described(loaded.append, is_loaded_together=True)
    samples = Samples(dataset, default_collate, 0, seeded=False)
    assert samples.batch(0, [1, 2], answers.pop) is None
    assert not loaded and not answers


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "collate", "lengths"),
    [(as_dict, only_rows, None), (as_list, None, [1, 1]), (as_pair, as_they_are, None)],
    ids=["tensors one a sample", "lists", "tuples one a sample"],
)
def test_lists_are_cut_by_samples_whatever_they_look_like(
    make: Callable[[int], Any], collate: Any, lengths: list[int] | None, size: int
) -> None:
    """A list of two samples with two rows each looks like two columns."""
    order = Order(num_samples=12, global_batch_size=size, shuffle=False)
    loader = Loader(Described(make), order, collate, loading=Loading())
    inputs = loader.synchronous(0, 0, 1).inputs
    found = cut(inputs, size - 1, size, size)
    if lengths is not None:
        assert [len(each) for each in found] == lengths
        assert [float(each.max()) for each in found] == [size - 1.0] * 2
    else:
        first = found[0][0] if isinstance(found[0], tuple) else found[0]
        assert len(found) == 1
        assert first.tolist() == rows_of(size - 1).tolist()


def test_a_batch_unpacks_and_has_the_names_of_dicts() -> None:
    """Scripts unpack batches in loops of their own. A name that no sample has raises KeyError."""
    batch = Batch(inputs=1, targets=2, indices=[0], weight=1.0, step=0, epoch=0)
    inputs, targets = batch
    assert (inputs, targets) == (1, 2)
    with pytest.raises(InvalidSpec, match=r"batch\.inputs and batch\.targets"):
        batch["image"]
    samples = [{"image": torch.tensor(float(n)), "label": torch.tensor(n)} for n in range(4)]
    order = Order(num_samples=4, global_batch_size=4, shuffle=False)
    only = Loader(samples, order).synchronous(0, 0, 1)
    assert only["image"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert only["label"].tolist() == [0, 1, 2, 3] and only.targets is None
    with pytest.raises(KeyError):
        only["nothing"]


def test_bad_datasets_and_sizes_are_refused_by_name() -> None:
    """The text has the value seen and the value expected."""
    with pytest.raises(InvalidSpec, match=r"\[3, 4\]"):
        describe((torch.zeros(3), torch.zeros(4)))
    for columns in ((torch.zeros(3), torch.tensor(1.0)), (torch.tensor(1.0),)):
        with pytest.raises(InvalidSpec, match=r"have none; saw \[.*None\]"):
            dataset_size(columns)
    with pytest.raises(InvalidSpec, match="no length"):
        dataset_size(iter([1]))  # type: ignore[arg-type]
    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2)
    with pytest.raises(InvalidSpec, match=r"saw DataLoader; expected a map-style dataset"):
        dataset_size(loader)  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match=r"global_batch_size.*saw 0"):
        Order(num_samples=3, global_batch_size=0)
    with pytest.raises(InvalidSpec, match=r"no samples"):
        Order(num_samples=0, global_batch_size=2)


def test_columns_in_a_list_or_dict_are_refused() -> None:
    """Columns would each be one sample. A list of samples is not mistaken for columns."""
    images, labels = torch.zeros(6, 2), torch.zeros(6)
    for columns in ([images, labels], {"image": images, "label": labels}):
        with pytest.raises(InvalidSpec, match=r"\(6, 2\).*tuple of tensors"):
            dataset_size(columns)  # type: ignore[arg-type]
    for samples in ([images, images], [images, images[:2]], {0: images, 1: images}):
        assert dataset_size(samples) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_counted_to_the_last_of_an_epoch_also_where_the_batch_size_changed(
    drop_last: bool,
) -> None:
    before = Order(num_samples=23, global_batch_size=5, num_epochs=3, drop_last=drop_last)
    for size, first in product(range(1, 24), range(before.num_steps)):
        order = replace(before, global_batch_size=size, origin=before.position(first))
        steps = range(first, order.num_steps + 1)
        indices = [order.epoch_and_batch_index(step) for step in steps]
        assert [epoch for epoch, _ in indices] == [order.position(step).epoch for step in steps]
        assert indices[-1] == (order.num_epochs, 0)
        for (epoch, number), following in pairwise(indices):
            is_last = number == order.steps_per_epoch - 1
            assert following == ((epoch + 1, 0) if is_last else (epoch, number + 1))
