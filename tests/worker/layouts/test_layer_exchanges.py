"""Ranks that split layers detect that they computed with different layers."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from shoal.layouts.layer_exchanges import (
    MAX_KEPT,
    MAX_RECORDED,
    WORD_BITS,
    ExchangeRecord,
    LayerExchanges,
    difference,
    ranks_that_differ,
)

LAYERS = ["inner", "first", "second", "outer"]


def after(layers: Sequence[int], *, peers: Sequence[int] = (0, 1)) -> LayerExchanges:
    """Return the exchanges of a rank that has met its peers for these layers since its step
    began."""
    exchanges = LayerExchanges()
    exchanges.set_peers(peers)
    sites = [exchanges.add_site(name) for name in LAYERS]
    exchanges.begin_step()
    for layer in layers:
        sites[layer].value()
    return exchanges


def record_of(exchanges: LayerExchanges) -> ExchangeRecord:
    found = exchanges.record()
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_ranks_with_the_same_layers_never_differ_however_far_each_has_come(seed: int) -> None:
    """Messages that are lost or late leave one rank behind the others: a rank that is cut off for
    minutes is not refused once its network works again."""
    drawn = random.Random(seed)
    layers = drawn.choices(range(len(LAYERS)), k=drawn.randrange(1, 3 * MAX_RECORDED))
    counts = [drawn.randrange(1, len(layers) + 1) for _ in range(3)]
    assert difference({str(n): record_of(after(layers[:n])) for n in counts}) is None


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_wait_at_different_layers_of_one_pass_differ(seed: int) -> None:
    """A rank that left out a layer waits at the end of its passes, while the other one waits for it
    in one more layer."""
    drawn = random.Random(seed)
    layers = drawn.choices(range(len(LAYERS)), k=drawn.randrange(2, 3 * MAX_RECORDED))
    without = [*layers]
    del without[drawn.randrange(len(layers))]
    shorter = after(without)
    shorter.end_passes()
    found = difference({"a": record_of(after(layers)), "b": record_of(shorter)})
    assert found is not None
    assert found["a"] != found["b"]


def test_the_first_difference_is_given_by_names_of_layers() -> None:
    shorter = after([0, 1, 3])
    shorter.end_passes()
    found = difference({"a": record_of(after([0, 1, 2, 3])), "b": record_of(shorter)})
    assert found == {"a": "at the outputs of second", "b": "at the outputs of outer"}


def test_steps_are_not_compared_with_earlier_ones() -> None:
    """A record from a wait that ended well says nothing about the next step."""
    later = after([0])
    later.begin_step()
    later.note(2)
    assert difference({"a": record_of(after([0, 1])), "b": record_of(later)}) is None


def test_exchanges_that_are_no_longer_kept_count_in_the_summary_of_a_step() -> None:
    many = [number % len(LAYERS) for number in range(2 * MAX_KEPT)]
    words = [after(layers).summary() for layers in (many, many, [1, *many[1:]], many[:-1])]
    assert words[0] == words[1]
    assert len(set(words)) == 3
    assert max(words).bit_length() == WORD_BITS
    assert ranks_that_differ(words[:2]) == ()


def test_ranks_are_compared_with_those_that_they_split_layers_with() -> None:
    """Two groups have samples of their own; a further rank splits no layers."""
    first = [after([0, 1], peers=(0, 1)).summary() for _ in range(2)]
    second = [after([0, 2], peers=(2, 3)).summary() for _ in range(2)]
    assert ranks_that_differ([*first, *second, 0]) == ()
    differs = after([1, 0], peers=(2, 3)).summary()
    assert ranks_that_differ([*first, second[0], differs]) == [2, 3]


def test_models_that_are_split_among_different_ranks_are_not_compared() -> None:
    exchanges = after([0], peers=(0, 1))
    exchanges.set_peers((0, 1))
    assert exchanges.record() is not None
    exchanges.set_peers((0, 1, 2, 3))
    assert exchanges.record() is None
    assert exchanges.summary() == 0


def test_a_whole_parameter_without_a_gradient_is_recorded_by_its_name() -> None:
    """Frozen parameters have no gradient on any rank."""
    parameters = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "ab"})
    parameters["frozen"] = nn.Parameter(torch.zeros(2), requires_grad=False)
    parameters["a"].grad = torch.zeros(2)
    exchanges = after([0])
    exchanges.add_whole_parameters(dict(parameters.items()))
    exchanges.end_passes()
    last = record_of(exchanges).last
    assert last == ["at the outputs of inner", "without a gradient of b", "done with its passes"]
