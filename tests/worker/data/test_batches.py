"""The elastic sampler: order by seed and epoch, shares by the roster, weights that add up."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shoal.data.batches import Batch, Loader, Order, dataset_size, describe, share
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
def test_each_sample_comes_once_an_epoch_whatever_the_world_does(
    order: Order, world_sizes: list[int]
) -> None:
    """The world size is another one in each step."""
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
    """Ranks in order hold what one process would."""
    loader = Loader((torch.arange(order.num_samples),), order)
    for step in range(min(order.num_steps, 4)):
        alone = loader.synchronous(step, 0, 1).indices
        together = [loader.synchronous(step, rank, world_size) for rank in range(world_size)]
        assert [index for batch in together for index in batch.indices] == alone


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_shares_are_contiguous_and_differ_by_one_at_most(
    start: int, length: int, world_size: int
) -> None:
    """Nothing is left between them."""
    shares = [share(start, start + length, rank, world_size) for rank in range(world_size)]
    assert shares[0][0] == start
    assert shares[-1][1] == start + length
    assert all(a[1] == b[0] for a, b in pairwise(shares))
    sizes = [stop - first for first, stop in shares]
    assert max(sizes) - min(sizes) <= 1


@given(orders, st.integers(1, 9))
def test_weighted_means_of_the_members_average_to_the_mean_of_the_batch(
    order: Order, world_size: int
) -> None:
    """Uneven shares and members without any included; those hold one sample of weight 0."""
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
    assert torch.equal(order.epoch_order(1), other.epoch_order(1))
    for different in (
        order.epoch_order(0),
        Order(num_samples=1000, global_batch_size=10, seed=2).epoch_order(1),
    ):
        assert int((order.epoch_order(1) == different).sum()) < 20


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
    """Tensors as a whole are indexed, items one by one are collated."""
    order = Order(num_samples=dataset_size(dataset), global_batch_size=3)
    batch = Loader(dataset, order).synchronous(0, 0, 1)
    assert batch.inputs.tolist() == batch.indices
    assert batch.targets.tolist() == [index * index for index in batch.indices]


def test_three_columns_are_two_inputs_and_a_target() -> None:
    """A single one is an input without target."""
    column = torch.arange(4)
    order = Order(num_samples=4, global_batch_size=4, shuffle=False)
    batch = Loader((column, column + 1, column + 2), order).synchronous(0, 0, 1)
    assert [part.tolist() for part in batch.inputs] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert batch.targets.tolist() == [2, 3, 4, 5]
    assert Loader((column,), order).synchronous(0, 0, 1).targets is None


def test_a_batch_unpacks_and_has_the_names_of_dicts() -> None:
    """What people write in loops of their own; a name that no sample has is refused by name."""
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
    """Seen and expected are in the text."""
    with pytest.raises(InvalidSpec, match=r"\[3, 4\]"):
        describe((torch.zeros(3), torch.zeros(4)))
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
    """Each of them would be one sample. A list of samples is none of columns."""
    images, labels = torch.zeros(6, 2), torch.zeros(6)
    for columns in ([images, labels], {"image": images, "label": labels}):
        with pytest.raises(InvalidSpec, match=r"\(6, 2\).*tuple of tensors"):
            dataset_size(columns)  # type: ignore[arg-type]
    for samples in ([images, images], [images, images[:2]], {0: images, 1: images}):
        assert dataset_size(samples) == 2  # type: ignore[arg-type]
