"""Cutting a model into stages: all ranks cut alike and evenly, and stages in a row compute what the
model computes."""

import copy
import itertools
import random

import pytest
import torch
from support.models import pipeline_models as models
from torch import nn

from shoal.layouts.pipeline.layer_profiler import measured
from shoal.layouts.pipeline.stage_splitter import StageSplitter, balanced
from shoal.layouts.pipeline.stages import Stage
from shoal_proto.errors import InvalidSpec


def best_by_trying_all(costs: list[int], num_stages: int) -> int:
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_has_a_cheaper_costliest_stage(seed):
    drawn = random.Random(seed)
    costs = [drawn.choice((0, 1, 5, drawn.randrange(1000))) for _ in range(drawn.randint(1, 9))]
    for num_stages in range(1, len(costs) + 1):
        stage_of = balanced(costs, num_stages)
        assert stage_of == sorted(stage_of), (seed, "stages are runs")
        assert set(stage_of) == set(range(num_stages)), (seed, "no stage is empty")
        totals = [
            sum(cost for cost, stage in zip(costs, stage_of, strict=True) if stage == number)
            for number in range(num_stages)
        ]
        assert max(totals) == best_by_trying_all(costs, num_stages), (seed, costs, num_stages)


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1, 1, 1], 3, [0, 0, 1, 1, 2]),
        ([9, 1, 1, 1], 2, [0, 1, 1, 1]),
        ([1, 1, 1, 9], 2, [0, 0, 0, 1]),
        ([0, 0, 0], 3, [0, 1, 2]),
        ([5], 1, [0]),
    ],
)
def test_the_cut_of_known_costs(costs, num_stages, expected):
    assert balanced(costs, num_stages) == expected


def on_meta(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("meta")


def stages_of(
    model: nn.Module, num_stages: int, splitter: StageSplitter | None = None
) -> list[Stage]:
    splitter = splitter or StageSplitter()
    outline = splitter.outline(on_meta(model), num_stages)
    stage_of = splitter.stage_of(outline, num_stages)
    return [Stage(copy.deepcopy(model), outline, stage_of, index) for index in range(num_stages)]


def run_in_a_row(stages: list[Stage], *inputs: torch.Tensor) -> object:
    passed: object = ()
    for stage in stages:
        own = tuple(each.clone() for each in inputs)  # as each rank has inputs of its own
        passed = stage.run(stage.bind(own, {}), passed)  # type: ignore[arg-type]
        if stage is not stages[-1]:
            passed = tuple(received(each) for each in passed)  # type: ignore[attr-defined]
    return passed


def assert_stages_compute(model: nn.Module) -> None:
    """Compare the results of one to three stages with those of the model."""
    inputs, _ = models.numbers()
    expected = copy.deepcopy(model)(inputs.clone())
    for num_stages in (1, 2, 3):
        found = run_in_a_row(stages_of(model, num_stages), inputs)
        torch.testing.assert_close(found, expected)


def received(sent: torch.Tensor) -> torch.Tensor:
    """Copy a tensor as the next stage receives it: with memory of its own, and as a leaf."""
    return sent.detach().clone().requires_grad_(sent.requires_grad)


ROWS = [
    (models.perceptron, models.numbers, (1, 2, 3, 4)),
    (models.Counted, models.numbers, (1, 3)),
    (models.Noisy, models.numbers, (2,)),
    (models.transformer, models.tokens, (2, 6, 8)),
    (models.tied_transformer, models.tokens, (1, 2, 3, 4)),
]


@pytest.mark.sampled()
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("make", "data", "counts"), ROWS)
def test_stages_in_a_row_compute_what_the_model_computes(make, data, counts, training):
    inputs, _ = data()
    model = make().train(training)
    for num_stages in counts:
        stages = stages_of(model, num_stages)
        torch.manual_seed(7)
        expected = copy.deepcopy(model)(inputs)
        torch.manual_seed(7)
        assert torch.equal(run_in_a_row(stages, inputs), expected), num_stages


class Changed(nn.Module):
    """A model that changes a value in place before its second layer, and uses it in the third."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.change = change
        self.register_buffer("kept", torch.ones(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], 5)
        rows, total = mask[:3], mask.sum()
        inputs_before = x.sum()
        out = self.layers[0](x) * inputs_before
        if self.change == "value":
            mask.tril_()
        elif self.change == "view":
            mask[:, 2:].zero_()
        elif self.change == "diagonal":
            mask.fill_diagonal_(0)
        elif self.change == "out":
            torch.add(mask, 1, out=mask)
        elif self.change == "input":
            x.add_(1)
        elif self.change == "view of the input":
            x[:2].add_(1)
        elif self.change == "view of a buffer":
            self.kept[0].zero_()
        out = self.layers[1](out @ mask)
        out = self.layers[2](out) @ mask * total
        last: torch.Tensor = out[:, :3] @ rows + inputs_before + x + self.kept[0]
        return last


@pytest.mark.parametrize(
    "change", ["value", "view", "diagonal", "out", "input", "view of the input"]
)
def test_a_change_in_place_holds_in_later_stages(change):
    """Regression: later stages computed the value again, without the change."""
    assert_stages_compute(Changed(change))


def test_a_change_in_place_that_later_stages_would_not_see_is_refused():
    text = r"a view of kept in place \(zero_\).*kept\.clone\(\)"
    with pytest.raises(InvalidSpec, match=text):
        stages_of(Changed("view of a buffer"), 2)


class Block(nn.Module):
    """A user's layer without parameters, which changes its input in place within."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(x) * 2
        return out


class ChangedLater(nn.Module):
    """A model that changes a value of its first stage after its second layer."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(5))
        self.act, self.pool = nn.ReLU(inplace=True), nn.AvgPool1d(1)
        self.block = Block()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, scaled, pooled = self.layers[0](x), x * self.scale, self.pool(x)
        mask = torch.ones(x.shape[1], 5)
        rows, others = mask[:3], x[:2]
        out = self.layers[1](first)
        if self.change == "activation":
            out = self.act(first) + out
        elif self.change == "sum":
            first += out
        elif self.change == "layer":
            out = out + self.act(scaled)
        elif self.change.startswith("block"):
            out = out + self.block(
                {"block": scaled, "block on the input": x}.get(self.change, first)
            )
        elif self.change == "layer on the input":
            out = out + self.act(x)
        elif self.change == "layer on a new value":
            out = out + self.act(pooled)
        elif self.change in ("base", "base of a used view"):
            mask.tril_()
        elif self.change == "view of the base of a used view":
            mask[:, 2:].zero_()
        elif self.change == "layer on a view of the input":
            out = out + self.act(x[:, :1])
        elif self.change == "view of a used base":
            rows.zero_()
        elif self.change == "input with a used view":
            x.add_(1)
        out = self.layers[2](out) @ mask + first + scaled + x
        if self.change.endswith(("used view", "used base")):
            out = out[:, :3] @ rows
        out = out + others.sum()
        last: torch.Tensor = out
        return last


@pytest.mark.parametrize(
    "change",
    [
        "activation",
        "sum",
        "layer",
        "block",
        "block on an activation",
        "block on the input",
        "layer on the input",
        "layer on a view of the input",
        "layer on a new value",
        "base",
        "base of a used view",
        "view of the base of a used view",
        "view of a used base",
        "input with a used view",
    ],
)
def test_a_change_in_place_of_a_value_from_an_earlier_stage_has_the_models_result(change):
    """Regression: a layer's change was lost, that of a received activation raised, and views, sent
    as tensors of their own, were used without the change."""
    assert_stages_compute(ChangedLater(change))


def test_the_layers_of_a_model_that_changes_a_value_with_views_can_be_measured():
    """Regression: the change was refused, as a layer was then measured as a stage of its own."""
    inputs, _ = models.numbers()
    model = on_meta(ChangedLater("base of a used view"))
    outline = StageSplitter().outline(model, 2)
    assert len(measured(model, outline, inputs, torch.device("cpu"))) == 3


class Up(nn.Module):
    """A user's layer without parameters, which torch.fx does not know."""

    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, skipped], dim=1)


class SkipConnections(nn.Module):
    """A network that changes activations in place and uses them again, as vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, 5) for n in (5, 5, 10, 5, 10))
        self.norm = nn.LayerNorm(5)
        self.act, self.up = nn.ReLU(inplace=True), Up()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.act(self.layers[0](x))
        second = self.layers[1](first)
        shortcut = self.norm(first)
        second += shortcut
        joined = self.act(self.layers[2](self.up(self.act(second), first)))
        joined += self.layers[3](joined)
        last: torch.Tensor = self.layers[4](self.up(self.act(joined), x))
        return last


class Add(nn.Module):
    """A user's layer without parameters, which takes two values of the same shape."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class ChangedBetween(nn.Module):
    """A model that changes new values in place, and uses again what they were made from."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.joined = nn.ModuleList(nn.Linear(10, 5) for _ in range(2))
        self.act, self.up, self.add = nn.ReLU(inplace=True), Up(), Add()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        if self.kind == "residual":
            out = self.act(self.add(self.layers[1](first), first))
        elif self.kind == "joined":
            out = self.joined[0](self.act(self.up(self.layers[1](first), first)))
            out = self.joined[1](self.act(self.up(out, first)))
        elif self.kind == "view as":
            out = self.act(self.layers[1](first.flatten(1)).view_as(first))
        elif self.kind == "order":
            order = x.sum(1).argsort()
            first = self.act(first[order])
            out = self.layers[1](first)[order.argsort()]
        elif self.kind == "input":
            out = self.act(self.add(first, x)) + x
        elif self.kind == "view as the input":
            out = self.act(first.view_as(x)) + x
        elif self.kind == "parts":
            ones = torch.ones(x.shape[1], 5, dtype=torch.int64)
            upper, lower = ones[:2], ones[2:]
            out = self.layers[1](first)
            upper *= 2
            out = self.layers[2](out) * upper[0] * lower[0]
        elif self.kind == "list":
            halves = torch.ones(x.shape[1], 5).chunk(5)
            out = self.layers[1](first)
            halves[0].mul_(2)
            out = self.layers[2](out) * halves[0] + halves[1]
        last: torch.Tensor = self.layers[3](self.layers[2](out)) + first
        return last


@pytest.mark.parametrize(
    "kind",
    ["residual", "joined", "view as", "order", "input", "view as the input", "parts", "list"],
)
def test_changes_of_values_that_only_seem_to_be_views_work_in_any_number_of_stages(kind):
    """Regression: models were refused if a layer's result could be a view of two values."""
    assert_stages_compute(ChangedBetween(kind))


@pytest.mark.parametrize("make", [SkipConnections, models.rectified])
def test_usual_changes_in_place_work_in_any_number_of_stages(make):
    inputs, _ = models.numbers()
    model = make()
    expected = copy.deepcopy(model)(inputs.clone())
    for num_stages in (1, 2, 3, 4):
        found = run_in_a_row(stages_of(model, num_stages), inputs)
        torch.testing.assert_close(found, expected)


@pytest.mark.sampled()
@pytest.mark.parametrize("make", [models.perceptron, models.Counted, models.tied_transformer])
def test_stages_hold_the_whole_model_under_its_own_names_and_nothing_twice(make):
    model = make()
    stages = stages_of(model, 3)
    whole = dict(model.named_parameters())
    held = [name for stage in stages for name in stage.parameters]
    assert set(held) == set(whole)
    tied = {name for name in held if held.count(name) > 1}
    assert tied == ({"wte.weight"} if make is models.tied_transformer else set())
    for stage in stages:
        bytes_held = sum(p.nbytes for p in stage.model.parameters())
        assert bytes_held == sum(whole[name].nbytes for name in stage.parameters)
        assert all(stage.index in stage.holders[name] for name in stage.parameters)
    buffers = [name for stage in stages for name, _ in stage.model.named_buffers()]
    assert set(buffers) == {name for name, _ in model.named_buffers()}


def test_a_parameter_that_nothing_uses_stays_in_the_first_stage():
    first, second = stages_of(models.Counted(), 2)
    assert "idle" in first.parameters
    assert "idle" not in second.parameters
    assert first.holders["idle"] == (0,)


def test_layers_in_nested_containers_are_cut_apart():
    outline = StageSplitter().outline(on_meta(models.perceptron()), 1)
    assert [segment.name for segment in outline.segments] == ["0.0", "0.2.0", "1", "3"]
    assert [segment.num_bytes for segment in outline.segments] == [168, 288, 240, 56]


def test_a_block_is_opened_only_if_there_are_more_stages_than_blocks():
    model = on_meta(models.transformer())
    splitter = StageSplitter()
    blocks = [segment.name for segment in splitter.outline(model, 7).segments]
    assert blocks == ["wte", "wpe", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    finer = [segment.name for segment in splitter.outline(model, 8).segments]
    assert finer[2:5] == ["blocks.0.norm", "blocks.0.mix", "blocks.0.mlp"]
    again = [segment.name for segment in splitter.outline(model, 7).segments]
    assert again == blocks, "what one generation needed does not change the next one's cut"


def test_the_model_is_cut_only_where_the_user_says():
    splitter = StageSplitter(split_at=["blocks.1", "norm"])
    outline = splitter.outline(on_meta(models.transformer()), 3)
    assert splitter.stage_of(outline, 3) == [0, 0, 0, 1, 1, 2, 2]
    assert splitter.stage_of(outline, 2) == [0, 0, 0, 1, 1, 1, 1]
    inner = StageSplitter(split_at=["blocks.1.mlp"])
    outline = inner.outline(on_meta(models.transformer()), 2)
    second = inner.stage_of(outline, 2).index(1)
    assert outline.segments[second].name == "blocks.1.mlp.0"


def test_the_refusal_of_too_few_layers_has_their_number():
    with pytest.raises(InvalidSpec, match=r"5 stages; saw 4 layers .*0\.0, 0\.2\.0, 1, 3"):
        StageSplitter().outline(on_meta(models.perceptron()), 5)
    with pytest.raises(InvalidSpec, match="3 stages; saw 2 parts by split_at"):
        StageSplitter(split_at=["1"]).outline(on_meta(models.perceptron()), 3)


def test_an_unknown_place_to_split_at_is_named_beside_the_known_ones():
    with pytest.raises(
        InvalidSpec, match=r"before 'layers\.9'.*expected names among 0\.0, 0\.2\.0"
    ):
        StageSplitter(split_at=["layers.9"]).outline(on_meta(models.perceptron()), 2)


def test_a_forward_pass_that_depends_on_values_is_refused_with_a_way_out():
    with pytest.raises(InvalidSpec, match=r"Dependent cannot be cut.*nn\.Sequential"):
        StageSplitter().outline(on_meta(models.Dependent()), 2)


def test_inputs_with_a_default_are_fixed_to_it():
    (stage,) = stages_of(models.transformer(), 1)
    ids, _ = models.tokens()
    assert list(stage.bind((ids,), {"scores": None})) == ["ids"]
    with pytest.raises(InvalidSpec, match="laid out for scores=None"):
        stage.bind((ids,), {"scores": torch.ones(1)})


class Weighted(nn.Module):
    """A model that multiplies its input by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * weight)
        return out


def test_a_tensor_in_place_of_a_number_is_refused_as_another_value():
    (stage,) = stages_of(Weighted(), 1)
    inputs, _ = models.numbers()
    assert list(stage.bind((inputs, 1), {})) == ["x"]
    with pytest.raises(InvalidSpec, match=r"laid out for weight=1\.0"):
        stage.bind((inputs,), {"weight": torch.ones(5)})


class Further(nn.Module):
    """A model whose forward pass takes further values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, *more: torch.Tensor, **options: float) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * options.get("scale", 1.0)
        return out + sum(more)


@pytest.mark.parametrize(
    ("more", "options", "text"),
    [
        ((), {"scale": 2.0, "by": 1.0}, r"no values in \*\*options.*; saw scale, by;"),
        ((torch.ones(5), torch.ones(5)), {}, r"no values in \*more.*; saw 2 values;"),
    ],
)
def test_values_that_the_trace_has_no_input_for_are_refused(more, options, text):
    """Regression: the outputs were those of a call without these values."""
    (stage,) = stages_of(Further(), 1)
    inputs, _ = models.numbers()
    assert list(stage.bind((inputs,), {})) == ["x"]
    with pytest.raises(InvalidSpec, match=text):
        stage.bind((inputs, *more), options)


class CalledTwice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.between = layer, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.between(self.layer(x)))
        return out


def test_a_layer_that_two_stages_call_is_shared_unless_it_keeps_statistics():
    model = CalledTwice(nn.Linear(5, 5))
    stages = stages_of(model, 3)
    assert stages[0].holders["layer.weight"] == (0, 2)
    inputs, _ = models.numbers()
    assert torch.equal(run_in_a_row(stages, inputs), model(inputs))
    with pytest.raises(InvalidSpec, match=r"layer is called by more than one stage.*running_mean"):
        stages_of(CalledTwice(nn.BatchNorm1d(5)), 3)
    inner = CalledTwice(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    with pytest.raises(InvalidSpec, match=r"layer\.1 is called by more than one stage"):
        stages_of(inner, 3)


def test_a_buffer_of_two_layers_is_kept_once_by_one_stage_and_refused_over_two():
    norms = [nn.BatchNorm1d(5), nn.BatchNorm1d(5)]
    norms[1].running_mean = norms[0].running_mean
    model = nn.Sequential(nn.Linear(5, 5), *norms, nn.Linear(5, 50))
    first, second = stages_of(model, 2)
    assert [set(stage.buffers) for stage in (first, second)] == [
        {f"1.{name}" for name, _ in norms[0].named_buffers()}
        | {"2.running_var", "2.num_batches_tracked"},
        set(),
    ]
    with pytest.raises(InvalidSpec, match=r"1\.running_mean and 2\.running_mean are one buffer"):
        stages_of(model, 4)
    # The buffer is now a constant, as registered.
    for norm in norms:
        norm._non_persistent_buffers_set.add("running_mean")
    assert len(stages_of(model, 4)) == 4
