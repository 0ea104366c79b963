"""Orders of many samples: a permutation that is computed one piece at a time."""

import pytest
import torch

from shoal.data.order import LARGEST_KEPT_ORDER, Order
from shoal.data.permutation import KeyedPermutation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4096, 4097])
def test_each_number_comes_once(size: int) -> None:
    for key in (0, 1, 2**62):
        found = KeyedPermutation(size, key)(torch.arange(size))
        assert sorted(found.tolist()) == list(range(size))


def test_a_piece_of_a_permutation_equals_that_part_of_the_whole() -> None:
    whole = KeyedPermutation(1000, 5)(torch.arange(1000))
    piece = KeyedPermutation(1000, 5)(torch.arange(700, 711))
    assert piece.tolist() == whole[700:711].tolist()


def test_numbers_and_neighbours_are_spread_as_at_random() -> None:
    """The chi-squares of the positions of numbers, and of the distances between neighbours, are
    below 50: with 15 degrees of freedom, so are those of all but 1 of 80,000 random
    permutations."""
    size = 1 << 14
    for key in range(20):
        found = KeyedPermutation(size, key)(torch.arange(size))
        for values in (found[: size // 2], (found[1:] - found[:-1]) % size):
            counts = torch.histc(values.double(), 16, 0, size).double()
            expected = len(values) / 16
            assert float(((counts - expected) ** 2 / expected).sum()) < 50


def test_other_keys_give_other_permutations() -> None:
    numbers = torch.arange(10_000)
    one, other = (KeyedPermutation(10_000, key)(numbers) for key in (1, 2))
    assert int((one == other).sum()) < 10


def test_an_order_of_very_many_samples_needs_no_array_of_them() -> None:
    """The data set has 10^12 samples; each epoch has an order of its own."""
    order = Order(num_samples=10**12, global_batch_size=100_000, num_epochs=2, seed=3)
    epoch, start, stop = order.span(4_000_000)
    first = order.indices(epoch, start, stop)
    assert len(set(first.tolist())) == 100_000
    assert int(first.min()) >= 0 and int(first.max()) < 10**12
    assert not torch.equal(first, order.indices(1, start, stop))
    assert torch.equal(first[50_000:], order.indices(epoch, start + 50_000, stop))


def test_orders_of_few_samples_follow_rule_1() -> None:
    """Any part of an epoch is that part of its permutation."""
    assert Order(num_samples=LARGEST_KEPT_ORDER, global_batch_size=1).rule == 1
    small = Order(num_samples=7, global_batch_size=2, seed=1)
    assert sorted(small.indices(0, 0, 7).tolist()) == list(range(7))
    assert small.indices(1, 0, 7)[2:5].tolist() == small.indices(1, 2, 5).tolist()


@pytest.mark.parametrize(
    ("num_samples", "first"),
    [
        (1000, [181, 140, 69, 566, 217, 260, 375, 822]),
        (LARGEST_KEPT_ORDER + 5, [529987, 1047956, 839975, 265640, 569098, 270640, 513118, 394991]),
    ],
)
def test_an_order_stays_the_same_in_all_releases(num_samples: int, first: list[int]) -> None:
    """A checkpoint names only the rule and the seed: with another order, samples would be trained
    on twice."""
    order = Order(num_samples=num_samples, global_batch_size=10, seed=7)
    assert order.indices(3, 0, 8).tolist() == first
