"""Dropout masks belong to samples: they do not depend on ranks, micro-batches or attempts."""

import copy
import math
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.order import range_of_rank
from shoal.randomness import at, mix, part, present, sample_generator, seed_torch
from shoal.randomness.dropout import draw, key_dropout, samples_along
from shoal_proto.errors import InvalidSpec

CPU = torch.device("cpu")
NUM_SAMPLES = 12
TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""


def keyed(module: nn.Module) -> nn.Module:
    """Give the module a name, as it would have in a model."""
    model = nn.Sequential(module)
    key_dropout(model)
    return module


def mask_of(module: nn.Module, *, seed: int = 1, step: int = 0, elements: int = 5000) -> Tensor:
    """Return the layer's mask for samples 0 to 11, as numbers around zero."""
    with at(seed=seed, step=step, first=0, count=NUM_SAMPLES):
        kept = draw(module, torch.Size([NUM_SAMPLES, elements]), CPU, p=0.5)
    assert kept is not None
    return kept.float() - 0.5


def whole(module: nn.Module, value: Tensor) -> Tensor:
    """Return the output of one process for the whole batch."""
    with at(seed=3, step=5, first=0, count=NUM_SAMPLES):
        output: Tensor = module(value)
    return output


SHAPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Dropout(0.3), (NUM_SAMPLES, 7)),
    "dropout of words": (lambda: nn.Dropout(0.3), (NUM_SAMPLES, 4, 7)),
    "dropout of flattened words": (lambda: nn.Dropout(0.3), (NUM_SAMPLES * 4, 7)),
    "dropout1d": (lambda: nn.Dropout1d(0.3), (NUM_SAMPLES, 9, 5)),
    "dropout2d": (lambda: nn.Dropout2d(0.3), (NUM_SAMPLES, 9, 5, 5)),
    "dropout3d": (lambda: nn.Dropout3d(0.3), (NUM_SAMPLES, 9, 3, 3, 3)),
    "alpha": (lambda: nn.AlphaDropout(0.3), (NUM_SAMPLES, 7)),
    "feature alpha": (lambda: nn.FeatureAlphaDropout(0.3), (NUM_SAMPLES, 9, 5)),
}


@pytest.mark.parametrize("case", SHAPED)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_ranks_draw_what_one_process_draws(case: str, num_ranks: int) -> None:
    """Ranks draw for their own samples; five ranks have uneven shares."""
    make, shape = SHAPED[case]
    module, value = keyed(make()), torch.randn(shape)
    expected = whole(module, value)
    rows = shape[0] // NUM_SAMPLES
    parts = []
    for rank in range(num_ranks):
        start, stop = range_of_rank(0, NUM_SAMPLES, rank, num_ranks)
        with at(seed=3, step=5, first=start, count=stop - start):
            parts.append(module(value[start * rows : stop * rows]))
    assert torch.equal(torch.cat(parts), expected)
    assert not torch.equal(expected, value)


def test_micro_batches_draw_what_the_batch_draws() -> None:
    """Holds on any rank, for any cut."""
    module, value = keyed(nn.Dropout()), torch.randn(NUM_SAMPLES, 7)
    expected = whole(module, value)
    with at(seed=3, step=5, first=4, count=8):
        for start, stop in ((0, 3), (3, 4), (4, 8)):
            with part(start, stop):
                assert torch.equal(module(value[4 + start : 4 + stop]), expected[4:][start:stop])


def test_samples_may_lie_along_another_dimension() -> None:
    """Words come first in torch's transformer layers; both layouts keep the same elements."""
    first, second = nn.Dropout(), nn.Dropout()
    keyed(first), keyed(second)
    samples_along(second, 1)
    value = torch.randn(NUM_SAMPLES, 4, 7)
    expected = whole(first, value)
    assert torch.equal(whole(second, value.transpose(0, 1)).transpose(0, 1), expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers_are_known_to_have_words_first(batch_first: bool) -> None:
    """The dropouts are the layers' own, without attention dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    layer.self_attn.dropout = 0.0
    key_dropout(layer)
    words = torch.randn(NUM_SAMPLES, 5, 8)
    value = words if batch_first else words.transpose(0, 1)
    expected = whole(layer, value)
    with at(seed=3, step=5, first=8, count=4):
        own = layer(words[8:] if batch_first else words[8:].transpose(0, 1))
    assert torch.allclose(own, expected[8:] if batch_first else expected[:, 8:], atol=1e-6)


@pytest.mark.parametrize("dim", [0, None])
def test_values_without_samples_get_one_mask_on_all_ranks(dim: int | None) -> None:
    """Embeddings of positions are an example. The layer is declared to have no samples, or it is
    detected: the first dimension is not a multiple of the number of samples."""
    module, value = keyed(nn.Dropout()), torch.randn(1, 50)
    if dim is None:
        samples_along(module, None)
    expected = whole(module, value)
    with at(seed=3, step=5, first=6, count=3):
        assert torch.equal(module(value), expected)


def test_elements_of_whole_channels_go_together() -> None:
    """The fraction dropped is about the one asked for."""
    kept = whole(keyed(nn.Dropout2d(0.25)), torch.ones(NUM_SAMPLES, 400, 2, 3))
    assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept))
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.02)


def test_an_input_without_samples_keeps_its_channels() -> None:
    """Dropout1d takes two dimensions as channels and length."""
    kept = whole(keyed(nn.Dropout1d()), torch.ones(400, 5))
    assert torch.equal(kept, kept[:, :1].expand_as(kept))
    assert 0 < int((kept[:, 0] == 0).sum()) < 400


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_the_rate_is_the_one_asked_for(p: float) -> None:
    """The rate is within four standard deviations over 1.2 million elements, and close in each
    sample."""
    dropped = whole(keyed(nn.Dropout(p)), torch.ones(NUM_SAMPLES, 100_000)) == 0
    for part_of, bound in ((dropped, 4), *((row, 5) for row in dropped)):
        deviation = math.sqrt(p * (1 - p) / part_of.numel())
        assert abs(float(part_of.float().mean()) - p) <= bound * deviation


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    """Preserving both is the purpose of alpha dropout."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(NUM_SAMPLES, 100_000, generator=generator)
    output = whole(keyed(nn.AlphaDropout(0.3)), value)
    assert float(output.mean()) == pytest.approx(0, abs=0.01)
    assert float(output.var()) == pytest.approx(1, abs=0.01)


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation, divided by the standard deviation that independent masks would have."""
    return abs(float((a * b).mean()) * 4) * math.sqrt(a.numel())


def test_masks_have_nothing_in_common() -> None:
    """Masks of two steps, seeds, layers and samples are uncorrelated, and so is a mask with itself,
    shifted."""
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    key_dropout(model)
    mask = mask_of(model[0])
    others = {
        "step": mask_of(model[0], step=1),
        "seed": mask_of(model[0], seed=2),
        "layer": mask_of(model[1]),
        "sample": mask.roll(1, 0),
        **{f"shifted by {n}": mask.roll(n, 1) for n in (1, 2, 3, 16, 64, 1024)},
    }
    found = {name: correlation(mask, other) for name, other in others.items()}
    assert max(found.values()) < 4.5, found
    neighbours = [correlation(mask[0], mask[row]) for row in range(1, NUM_SAMPLES)]
    assert max(neighbours) < 4.5, neighbours
    steps = [mask_of(model[0], step=step, elements=64).flatten() for step in range(40)]
    assert len({tuple(step.tolist()) for step in steps}) == 40


def test_bits_are_fair_in_every_column_and_over_runs() -> None:
    """Elements are kept half of the time, over many steps, and neighbours agree half of the
    time."""
    module = keyed(nn.Dropout())
    masks = torch.stack([mask_of(module, step=step, elements=100) for step in range(300)]) + 0.5
    by_element = masks.mean((0, 1))
    assert float((by_element - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(300 * NUM_SAMPLES)
    agree = (masks[..., 1:] == masks[..., :-1]).float().mean()
    assert float(agree) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(masks.numel()))


def test_each_call_within_a_step_draws_anew_and_a_redone_step_draws_the_same() -> None:
    """A module may be used several times in a model."""
    module, value = keyed(nn.Dropout()), torch.ones(NUM_SAMPLES, 50)
    attempts = []
    for _ in range(2):
        with at(seed=1, step=1, first=0, count=NUM_SAMPLES):
            attempts.append([module(value), module(value)])
    assert not torch.equal(attempts[0][0], attempts[0][1])
    assert torch.equal(attempts[0][0], attempts[1][0])
    assert torch.equal(attempts[0][1], attempts[1][1])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_gradients_are_right(kind: type[nn.Dropout], inplace: bool) -> None:
    """Gradients are checked numerically."""
    module = keyed(kind(0.4, inplace))

    def function(value: Tensor) -> Tensor:
        return whole(module, value * 1.0)

    value = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (value,))


class Recomputed(nn.Module):
    """Segments that share a dropout layer, each of which calls it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Dropout()
        self.segments = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), self.shared, nn.Tanh(), drop)
            for drop in (self.shared, nn.Dropout(), self.shared)
        )

    def forward(self, value: Tensor, run: Callable[..., Tensor]) -> Tensor:
        value = self.shared(value)
        for segment in self.segments:
            value = run(segment, value)
        return value


def nested(segment: nn.Module, value: Tensor) -> Tensor:
    """Checkpoint the segment as a part of a checkpointed function."""

    def outer(value: Tensor) -> Tensor:
        inner: Tensor = checkpoint(segment, value.tanh(), use_reentrant=False)
        return inner.tanh()

    return checkpoint(outer, value, use_reentrant=False)


def unnested(segment: nn.Module, value: Tensor) -> Tensor:
    output: Tensor = segment(value.tanh())
    return output.tanh()


def one_pass(model: nn.Module, value: Tensor, run: Callable[..., Tensor]) -> Tensor:
    return model(value, run).sum()


def two_passes(model: nn.Module, value: Tensor, run: Callable[..., Tensor]) -> Tensor:
    """A loss of two forward passes over the same samples."""
    return (model(value, run) * model(-value, run)).sum()


def two_parts(model: nn.Module, value: Tensor, run: Callable[..., Tensor]) -> Tensor:
    """A loss of two micro-batches."""
    losses = []
    for start, stop in ((0, 4), (4, NUM_SAMPLES)):
        with part(start, stop):
            losses.append(one_pass(model, value[start:stop], run))
    return sum(losses, torch.zeros(()))


def plain(segment: nn.Module, value: Tensor) -> Tensor:
    output: Tensor = segment(value)
    return output


def composable(segment: nn.Module, value: Tensor) -> Tensor:
    """Checkpoint the segment by hooks on it."""
    if composable_checkpoint.state(segment) is None:
        composable_checkpoint(segment)
    return plain(segment, value)


RECOMPUTING: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "reentrant": (partial(checkpoint, use_reentrant=True), plain),
    "not reentrant": (partial(checkpoint, use_reentrant=False), plain),
    "generators not restored": (
        partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
        plain,
    ),
    "nested": (nested, unnested),
    "composable": (composable, plain),
}


@pytest.mark.parametrize("way", RECOMPUTING)
@pytest.mark.parametrize("loss_of", [one_pass, two_passes, two_parts])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_forward_pass_that_is_computed_again_draws_the_same(
    way: str, loss_of: Callable[..., Tensor], elsewhere: bool
) -> None:
    """Gradients with activation checkpointing are those without it. Autograd recomputes the last
    segment first; for a GPU on a thread of its own."""
    torch.manual_seed(0)
    model = Recomputed()
    key_dropout(model)
    inputs = torch.randn(NUM_SAMPLES, 6, requires_grad=True)

    def gradients(run: Callable[..., Tensor]) -> Tensor:
        with at(seed=3, step=5, first=0, count=NUM_SAMPLES):
            loss = loss_of(model, inputs, run)
            if elsewhere:
                with ThreadPoolExecutor(1) as autograd:
                    autograd.submit(loss.backward).result()
            else:
                loss.backward()
        found, inputs.grad = inputs.grad, None
        assert found is not None
        return found

    recomputed, kept = RECOMPUTING[way]
    expected = gradients(kept)
    assert torch.equal(gradients(recomputed), expected)


class RecomputedByScript(torch.autograd.Function):
    """Activation checkpointing of a script's own."""

    @staticmethod
    def forward(ctx: Any, segment: nn.Module, value: Tensor) -> Tensor:
        ctx.segment = segment
        ctx.save_for_backward(value)
        output: Tensor = segment(value)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        value = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.segment(value)
        output.backward(gradient)
        assert value.grad is not None
        return None, value.grad


def recomputed_by_script(segment: nn.Module, value: Tensor) -> Tensor:
    output: Tensor = RecomputedByScript.apply(segment, value)
    return output


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_autograd_function_that_calls_a_module_again_in_backward_draws_the_same(
    elsewhere: bool,
) -> None:
    """Each micro-batch has its backward pass before the next one; a module is called once in
    each function."""
    model = nn.ModuleList(nn.Sequential(nn.Dropout(), nn.Tanh(), nn.Dropout()) for _ in range(2))
    key_dropout(model)

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        value = torch.ones(NUM_SAMPLES, 7, requires_grad=True)
        with at(seed=3, step=5, first=0, count=NUM_SAMPLES), ThreadPoolExecutor(1) as autograd:
            for start, stop in ((0, 4), (4, NUM_SAMPLES)):
                with part(start, stop):
                    loss = run(model[1], run(model[0], value[start:stop])).sum()
                    if elsewhere:
                        autograd.submit(loss.backward).result()
                    else:
                        loss.backward()
        assert value.grad is not None
        return value.grad

    assert torch.equal(gradient(recomputed_by_script), gradient(plain))


def two_calls(layer: nn.Module, value: Tensor) -> Tensor:
    return recomputed_by_script(nn.Sequential(layer, nn.Tanh(), layer), value)


def two_functions(layer: nn.Module, value: Tensor) -> Tensor:
    return recomputed_by_script(layer, value) + recomputed_by_script(layer, value)


def a_call_between(layer: nn.Module, value: Tensor) -> Tensor:
    output = recomputed_by_script(layer, value)
    with torch.no_grad():
        layer(value)
    return output


@pytest.mark.parametrize("run", [two_calls, two_functions, a_call_between])
def test_a_recomputation_of_an_unknown_call_is_refused(
    run: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    value = torch.randn(NUM_SAMPLES, 7, requires_grad=True)
    with at(seed=3, step=5, first=0, count=NUM_SAMPLES):
        output = run(keyed(nn.Dropout()), value)
        with pytest.raises(InvalidSpec, match="unknown which forward call"):
            output.sum().backward()


def test_recomputation_without_samples_draws_from_torch() -> None:
    """A step that has ended sets no samples."""
    module, value = keyed(nn.Dropout()), torch.ones(NUM_SAMPLES, 7, requires_grad=True)
    whole(module, value)
    output = checkpoint(module, value, use_reentrant=True)
    output.sum().backward()
    assert torch.equal(value.grad, output)


def test_evaluation_and_layers_outside_of_at_behave_as_in_torch() -> None:
    """Outside of `at`, layers draw from torch's own generator; in evaluation they drop nothing."""
    module, value = keyed(nn.Dropout()), torch.randn(NUM_SAMPLES, 7)
    torch.manual_seed(4)
    drawn = module(value)
    torch.manual_seed(4)
    assert torch.equal(drawn, nn.Dropout()(value))
    assert draw(module, value.shape, CPU, p=0.5) is None
    module.eval()
    assert torch.equal(whole(module, value), value)
    assert present() is None


def test_a_copied_model_draws_the_same() -> None:
    """Holds for a copy and a pickle. The copy is still a dropout, and its state_dict is the
    model's."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Dropout())
    names = list(model.state_dict())
    assert key_dropout(model) == 1
    value = torch.randn(NUM_SAMPLES, 7)
    expected = whole(model, value)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied[1], nn.Dropout)
        assert list(copied.state_dict()) == names
        assert torch.equal(whole(copied, value), expected)


def test_a_module_of_the_users_own_kind_is_left_alone_but_may_draw() -> None:
    """The module's forward pass must not be replaced."""

    class Own(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            kept = draw(self, input.shape, input.device, p=self.p)
            assert kept is not None
            return input.masked_fill(kept, 7.0)

    module, value = keyed(Own()), torch.zeros(NUM_SAMPLES, 50)
    assert set(whole(module, value).unique().tolist()) == {0.0, 7.0}
    assert type(module) is Own


def test_contexts_of_samples_nest_and_end_with_their_block() -> None:
    """A block that ends by an exception restores the earlier samples, too."""
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ValueError, match="stop"))
        stack.enter_context(at(seed=1, step=2, first=10, count=6))
        with part(2, 4), part(1, 2):
            place = present()
            assert place is not None
            assert (place.first, place.count) == (13, 1)
        raise ValueError("stop")
    assert present() is None
    with part(0, 1):
        assert present() is None


def test_torch_draws_the_same_when_a_step_is_redone() -> None:
    """Numbers differ with each step and share."""
    drawn = []
    for step, of_share in ((4, 0), (4, 0), (5, 0), (4, 1)):
        seed_torch(9, step, of_share)
        drawn.append(tuple(torch.rand(4).tolist()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_a_sample_has_a_generator_of_its_own() -> None:
    """The generator of a sample is the same on all ranks."""
    with at(seed=1, step=2, first=0, count=8):
        expected = torch.rand(3, generator=sample_generator(5, "noise"))
        other = torch.rand(3, generator=sample_generator(5, "crop"))
    with at(seed=1, step=2, first=4, count=4):
        assert torch.equal(torch.rand(3, generator=sample_generator(1, "noise")), expected)
    assert not torch.equal(other, expected)


def test_seeds_of_neighbours_differ() -> None:
    """Seeds depend on the order of the numbers, and all fit torch's generators."""
    seeds = [mix(a, b, c) for a in range(-4, 12) for b in range(16) for c in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_each_release() -> None:
    """A run that continues a checkpoint draws what the run before it would have drawn."""
    assert [mix(), mix(0), mix(1, 2, 3), mix(-5, 0), mix(2**64 - 1, 9)] == [
        0,
        8147104208329303767,
        3851293329796251419,
        6238319124558162012,
        7304427026523763826,
    ]


# --- training ---


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Take 20 steps of AdamW as one rank of a group, in micro-batches of at most two samples."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = copy.deepcopy(model)
    key_dropout(model)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(20):
        start, stop = range_of_rank(0, NUM_SAMPLES, rank, world_size)
        optimizer.zero_grad()
        with at(seed=11, step=step, first=start, count=stop - start):
            cuts = [*range(0, stop - start, 2), stop - start]
            for low, high in pairwise(cuts):
                with part(low, high):
                    outputs = replica(inputs[start:stop][low:high])
                    errors = (outputs - targets[start:stop][low:high]) ** 2
                    (errors.sum() * world_size / NUM_SAMPLES).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_training_with_dropout_does_not_depend_on_the_number_of_ranks() -> None:
    """Weights of one rank and of three ranks are the same; without keys they would be far apart."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.2), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(16, 1)
    )
    (alone,) = run_in_memory(train, 1, model, inputs, targets)
    for weights in run_in_memory(train, 3, model, inputs, targets):
        for own, expected in zip(weights, alone, strict=True):
            assert float((own - expected).abs().max()) < TOLERANCE


ODD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int | None]] = {
    **{name: (make, shape, 0) for name, (make, shape) in SHAPED.items()},
    "words first": (lambda: nn.Dropout(0.3), (5, NUM_SAMPLES, 7), 1),
    "no samples": (lambda: nn.Dropout(0.3), (5, 7), None),
    "samples that do not divide": (lambda: nn.Dropout(0.3), (NUM_SAMPLES + 1, 3, 7), 0),
    "all dropped": (lambda: nn.Dropout(1.0), (NUM_SAMPLES, 7), 0),
    "all but all dropped": (lambda: nn.Dropout(0.999), (NUM_SAMPLES, 700), 0),
}


def compiled_twice(backend: str, make: Callable[[], nn.Module], dim: int | None) -> nn.Module:
    """Return a module that calls the layer twice, compiled as one graph."""
    module = keyed(make())
    samples_along(module, dim)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = module

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(value), self.layer(value * 2)

    twice = Twice()
    twice.compile(backend=backend, fullgraph=True)
    return twice


@pytest.mark.sampled()
@pytest.mark.parametrize("case", ODD)
def test_a_compiled_graph_draws_what_the_layer_draws(case: str) -> None:
    """The graph has no break, and is not compiled again for another step or share."""
    make, shape, dim = ODD[case]
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain = keyed(make())
    samples_along(plain, dim)
    compiled: Any = compiled_twice(counting, make, dim)  # type: ignore[arg-type]
    value = torch.randn(shape)
    for step, first in ((1, 0), (2, 0), (2, 24)):
        with at(seed=3, step=step, first=first, count=NUM_SAMPLES):
            expected = plain(value), plain(value * 2)
        with at(seed=3, step=step, first=first, count=NUM_SAMPLES):
            found = compiled(value)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    assert len(graphs) == 1
    del graphs[:]


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_compiled_dropout_has_the_gradients_of_the_layer(backend: str) -> None:
    plain, compiled = keyed(nn.Dropout(0.3)), compiled_twice(backend, lambda: nn.Dropout(0.3), 0)
    gradients = []
    for run in (lambda v: (plain(v), plain(v * 2)), compiled):
        value = torch.randn(NUM_SAMPLES, 50, generator=torch.Generator().manual_seed(1))
        value.requires_grad_()
        with at(seed=3, step=5, first=0, count=NUM_SAMPLES):
            one, other = run(value)
            (one.square().sum() + other.sum()).backward()
        gradients.append(value.grad)
    assert torch.allclose(*gradients)


@pytest.mark.long
def test_a_compiled_graph_that_is_computed_again_draws_the_same() -> None:
    """A module that is called several times is refused: which call the backward pass repeats is
    unknown."""
    layers = [nn.Sequential(nn.Dropout(), nn.Tanh()), nn.Sequential(nn.Dropout(), nn.Tanh())]
    model = nn.ModuleList(layers)
    key_dropout(model)

    def run(segments: list[nn.Module], value: Tensor, *, again: bool) -> Tensor:
        for segment in segments:
            value = checkpoint(segment, value, use_reentrant=False) if again else segment(value)
        return value

    def gradient(segments: list[nn.Module], run: Callable[..., Tensor], again: bool) -> Tensor:
        value = torch.ones(NUM_SAMPLES, 6, requires_grad=True)
        with at(seed=3, step=5, first=0, count=NUM_SAMPLES):
            for sign in (1, -1):
                run(segments, sign * value, again=again).sum().backward()
        assert value.grad is not None
        return value.grad

    torch._dynamo.reset()
    compiled: Any = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(gradient(layers, compiled, True), gradient(layers, run, False))
    with pytest.raises(InvalidSpec, match="of its own for each call"):
        gradient([layers[0], layers[0]], compiled, True)


def test_compiled_dropout_drops_outside_of_steps_too() -> None:
    compiled = compiled_twice("eager", lambda: nn.Dropout(0.5), 0)
    one, other = compiled(torch.ones(1000))
    assert 400 < int(one.count_nonzero()) < 600
    assert not torch.equal(one * 2, other)


def test_a_copy_of_a_layer_counts_for_itself() -> None:
    module = keyed(nn.Dropout(0.5))
    other = copy.deepcopy(module)
    value = torch.ones(NUM_SAMPLES, 50)
    with at(seed=3, step=5, first=0, count=NUM_SAMPLES):
        assert torch.equal(module(value), other(value))
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(whole(again, value), whole(keyed(nn.Dropout()), value))


def test_a_graph_for_batches_of_any_size_draws_what_the_layer_draws() -> None:
    plain = keyed(nn.Dropout(0.3))
    model = keyed(nn.Dropout(0.3))
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    run: Any = torch.compile(
        lambda value: model(value) + 1, backend=counting, dynamic=True, fullgraph=True
    )
    for size in (4, 6, 10):
        value = torch.randn(size * 3, 7)
        with at(seed=3, step=5, first=8, count=size):
            expected = plain(value) + 1
        with at(seed=3, step=5, first=8, count=size):
            assert torch.equal(run(value), expected)
    assert len(graphs) == 1


def test_the_masks_stay_the_same_from_release_to_release() -> None:
    """Jobs that continue from a checkpoint, and members of another release, draw the same
    numbers."""
    with at(seed=7, step=41, first=96, count=4):
        kept = draw(keyed(nn.Dropout()), torch.Size([4, 8]), CPU, p=0.5)
    assert kept is not None
    assert ["".join(map(str, row)) for row in kept.int().tolist()] == [
        *("11010100", "00010111", "01011100", "00100101")
    ]
