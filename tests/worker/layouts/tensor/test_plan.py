"""The plan splits what can be split without changing the result, and gives reasons for the rest."""

from functools import partial

import pytest
import torch
from support.models import tensor_models as models
from torch import Tensor, nn

from shoal.layouts.tensor.derivation import derive
from shoal.layouts.tensor.plan import part_sizes
from shoal.strategies.layout.fsdp_tensor import FSDPTensor
from shoal.strategies.layout.tensor import TensorParallel
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer


def styles(model: nn.Module, degree: int = 2, **overrides: str) -> dict[str, str]:
    plan = derive(model, degree, overrides, min_split_bytes=0)
    return {
        entry.module: entry.style + (" paired" if entry.paired else "") for entry in plan.entries
    }


class Leaking(nn.Module):
    """A model that also uses the values between its two linear modules elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x).relu()
        return self.fc2(hidden) + hidden.mean()


class Normed(Leaking):
    """A model with an operation over the whole width between its linear modules."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.softmax(self.fc1(x), -1))


class Branching(Leaking):
    """A model with another operation between its linear modules in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden.relu() if self.training else hidden.softmax(-1))


class Optional(Leaking):
    """A model whose optional argument changes the operation between its linear modules."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = self.fc1(x).relu()
        return self.fc2(hidden if bias is None else hidden + bias)


class Unreadable(Leaking):
    """A model whose operations depend on values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) if x.sum() > 0 else x


class Repeated(Leaking):
    """A model that uses one dropout within the pair and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.fc1(x))))


class Listed(nn.Module):
    """A model whose pairs are in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


def test_linear_modules_with_elementwise_work_between_them_are_pairs():
    assert styles(models.mlp()) == {
        "0": "column paired",
        "2": "mask",
        "3": "row paired",
        "5": "column",
    }
    assert styles(models.Gated(4, 8)) == {
        "gate_proj": "column paired",
        "up_proj": "column paired",
        "down_proj": "row paired",
    }
    assert styles(Listed()) == {
        "ups.0": "column paired",
        "ups.1": "column paired",
        "downs.0": "row paired",
        "downs.1": "row paired",
    }


@pytest.mark.parametrize("module", [Leaking, Normed, Branching, Optional, Unreadable, Repeated])
def test_linear_modules_that_may_be_no_pair_are_gathered(module):
    found = styles(module())
    assert {found["fc1"], found["fc2"]} == {"column"}


def test_deriving_a_plan_does_not_change_the_model():
    class Counting(Leaking):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.seen: object = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = x
            return self.fc2(self.fc1(x))

    model = Counting()
    assert styles(model)["fc1"] == "column paired"
    assert model.seen is None and model.calls == 0 and model.training
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_attention_is_split_if_its_heads_divide_by_the_degree():
    assert styles(models.encoder_layer(), 2) == {
        "self_attn": "heads",
        "linear1": "column paired",
        "dropout": "mask",
        "linear2": "row paired",
        "norm1": "whole",
        "norm2": "whole",
    }
    plan = derive(models.encoder_layer(), 3, min_split_bytes=0)
    assert plan.entry("self_attn").style == "whole"
    assert plan.entry("self_attn").why == "4 heads do not divide by 3"


def test_tied_weights_are_cut_in_one_way_or_not_at_all():
    plan = derive(models.tied_gpt(), 2, min_split_bytes=0)
    assert (plan.entry("wte").style, plan.entry("lm_head").style) == ("vocab", "column")
    assert not plan.entry("lm_head").parts, "its bytes are counted once"
    odd = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    odd[1].bias = odd[0].bias
    assert styles(odd) == {"0": "whole", "1": "whole"}
    with pytest.raises(InvalidSpec, match=r"tied.*'row'"):
        styles(models.tied_gpt(), lm_head="row")
    assert styles(models.tied_gpt(), lm_head="whole")["wte"] == "whole"


class Pair(nn.Module):
    """A pair with a dropout between its modules, which a sequence around the pair may use too."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(8, 16), dropout, nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.drop(torch.relu(self.fc1(x))))
        return out


def test_modules_that_are_bound_together_by_several_ties_are_cut_alike():
    """A parameter cut in one module and whole in another would become two parameters."""
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.LayerNorm(8))
    chain[1].weight, chain[2].bias = chain[0].weight, chain[1].bias
    assert styles(chain) == dict.fromkeys("012", "column") | {"3": "whole"}
    chain[3].bias = chain[2].bias
    assert set(styles(chain).values()) == {"whole"}
    # Only with its bias is the output large enough to be cut.
    unlike = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    unlike[1].weight = unlike[0].weight
    plan = derive(unlike, 2, min_split_bytes=4 * 64 * 9)
    assert {entry.style for entry in plan.entries} == {"vocab", "column"}
    attention = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 8)])
    attention[1].weight = attention[0].out_proj.weight
    assert styles(attention) == {"0": "whole", "0.out_proj": "whole", "1": "whole"}


@pytest.mark.parametrize("strategy", [TensorParallel, partial(FSDPTensor, tensor=3)])
def test_a_size_that_an_override_does_not_fit_can_be_refused_before_the_bring_up(strategy):
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(12, 4)})
    strategy = strategy(plan={"attn": "heads"})
    for world_size in (1, 2):
        strategy.try_lay_out(attention, world_size)
    with pytest.raises(InvalidSpec, match="4 heads do not divide by 3"):
        strategy.try_lay_out(attention, 3)


def test_a_module_with_two_names_is_in_no_pair():
    """The module's other use may lie outside the pair, where values are whole."""
    pair = Pair(nn.Dropout(0.1))
    pair.same = pair.fc2
    assert "paired" not in " ".join(styles(pair).values())
    shared = nn.Dropout(0.1)
    around = nn.Sequential(shared, Pair(shared), nn.Sequential(Pair(nn.Dropout(0.1))))
    found = styles(around)
    assert (found["1.fc1"], found["2.0.fc1"]) == ("column", "column paired")


def test_small_modules_and_modules_with_hooks_stay_whole():
    watched = nn.Linear(8, 8)
    watched.register_forward_hook(lambda *_: None)
    assert styles(watched) == {"": "whole"}
    assert styles(nn.Embedding(8, 4, max_norm=1.0)) == {"": "whole"}
    assert styles(nn.Linear(8, 1)) == {"": "whole"}
    assert not derive(models.mlp(), 2).splits, "each module has less than min_split_bytes"
    assert "nothing is split" in str(derive(models.mlp(), 2))


def test_no_pair_has_a_hook_between_its_layers():
    """The hook would see the features of this rank only."""
    for between in (nn.ReLU(), nn.Dropout(0.1)):
        pair = nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8))
        assert "paired" in " ".join(styles(pair).values())
        for register in (between.register_forward_hook, between.register_full_backward_pre_hook):
            hook = register(lambda *_: None)
            assert "paired" not in " ".join(styles(pair).values())
            hook.remove()
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert "paired" in styles(layer)["linear1"]
    layer.dropout.register_forward_hook(lambda *_: None)
    assert "paired" not in styles(layer)["linear1"]


def test_the_plan_is_a_table():
    plan = derive(nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 2)), 3, min_split_bytes=0)
    head, titles, column, row = str(plan).splitlines()
    assert head == (
        "tensor parallel over 3 ranks: of 260 bytes of parameters the ranks hold 116 116 44"
    )
    assert titles.split() == [
        "module",
        "style",
        *["shape", "per", "rank", "bytes", "per", "rank", "why"],
    ]
    assert column.split(maxsplit=8) == [
        *("0", "column", "3x6", "3x6", "1x6", "84", "84", "28"),
        "its outputs go on to 2",
    ]
    assert row.split(maxsplit=8) == [
        *("2", "row", "2x3", "2x3", "2x1", "32", "32", "16"),
        "takes the parts of 0",
    ]
    assert plan.bytes_per_rank == (116, 116, 44)


def test_the_user_may_choose_the_styles_of_modules():
    assert styles(models.mlp(), **{"3": "whole"}) == {"0": "column", "3": "whole", "5": "column"}
    assert styles(models.gpt(), wpe="column", **{"blocks.*": "whole"})["wpe"] == "column"
    found = styles(models.gpt(), **{"blocks.0": "whole", "blocks.0.mlp.up_proj": "column"})
    assert found["blocks.0.mlp.up_proj"] == "column"
    assert found["blocks.0.mlp.down_proj"] == found["blocks.0.attn.q_proj"] == "whole"
    assert found["blocks.1.mlp.down_proj"] == "row paired"


@pytest.mark.parametrize(
    ("chosen", "degree", "says"),
    [
        ({"blocks.7.*": "whole"}, 2, r"a module that the model does not have; saw 'blocks\.7"),
        ({"wte": "row"}, 2, r"'wte', a Embedding; saw 'row'; expected 'vocab' or 'column'"),
        ({"ln_f": "column"}, 2, r"'ln_f', a LayerNorm; saw 'column'; expected 'whole'"),
        ({"lm_head": "diagonal"}, 2, r"saw 'diagonal'; expected 'column' or 'row' or 'whole'"),
        ({"wpe": "vocab"}, 6, r"'wpe' cannot be split over 6 ranks; saw 5 is fewer than 6 ranks"),
        ({}, 0, r"saw degree 0"),
    ],
)
def test_styles_that_do_not_fit_the_model_are_refused(chosen, degree, says):
    with pytest.raises(InvalidSpec, match=says):
        derive(models.gpt(), degree, chosen)


def test_the_strategy_refuses_models_and_optimizers_that_it_cannot_run():
    model = models.mlp()
    with pytest.raises(InvalidSpec, match="does not have"):
        TensorParallel({"nowhere": "row"}).check(model, models.momentum(model.parameters()))
    with pytest.raises(UnsupportedOptimizer, match="foreach=True"):
        TensorParallel().check(model, torch.optim.SGD(model.parameters(), 0.1, foreach=True))
    with pytest.raises(UnsupportedOptimizer, match="elementwise_optimizer=True"):
        TensorParallel().check(model, torch.optim.Adafactor(model.parameters()))
    with pytest.raises(InvalidSpec, match="min_split_bytes"):
        TensorParallel(min_split_bytes=-1)
    assert TensorParallel({"0": "row"}).options() != TensorParallel().options()


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_part_sizes_are_those_of_torchs_chunk(size, degree):
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(degree)]
    assert part_sizes(size, degree) == tuple(chunks + [0] * (degree - len(chunks)))


def attention_of(model: nn.Module, degree: int) -> dict[str, str]:
    found = styles(model, degree)
    prefix = "model.layers.0.self_attn."
    return {name.removeprefix(prefix): how for name, how in found.items() if prefix in name}


def test_attention_that_the_model_declares_is_split_by_heads() -> None:
    """The model has two heads of keys and values, so one for each of two ranks."""
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column paired")
    assert attention_of(models.declared(), 2) == {**columns, "o_proj": "row paired"}


class NormedHeads(models.Declared):
    """A model with parameters that multiply each head: each head contributes to their gradient."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model.layers:
            layer.self_attn.q_norm = nn.RMSNorm(4)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "degree"),
    [
        (models.declared(), 4),
        (models.Declared(attention_dropout=0.1), 2),
        (models.Declared(output_attentions=True), 2),
        (models.Declared(base_model_tp_plan=None), 2),
        (NormedHeads(), 2),
    ],
    ids=["too few heads", "dropout", "weights are shown", "undeclared", "norm of heads"],
)
def test_heads_that_would_not_be_those_of_one_process_are_gathered(
    model: nn.Module, degree: int
) -> None:
    found = attention_of(model, degree)
    assert {found[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")} == {"column"}
