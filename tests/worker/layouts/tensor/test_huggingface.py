"""A Llama of Hugging Face's, made from a configuration: its attention is split by heads."""

from typing import Any

import pytest
from support.models import tensor_models as models
from support.processes.worlds import (
    Training,
    assemble,
    largest_difference,
    one_process,
    train_rank,
)
from torch import Tensor, nn

import shoal
from shoal.layouts.base import Layout, World
from shoal.layouts.tensor.derivation import derive
from shoal.layouts.tensor.layout import TensorLayout

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def next_token(outputs: Any, targets: Tensor) -> Tensor:
    return models.next_token(outputs.logits, targets)


def split(model: nn.Module, world: World) -> Layout:
    return TensorLayout(model, world, derive(model, world.world_size, min_split_bytes=0))


def test_heads_and_feed_forward_layers_are_pairs() -> None:
    plan = derive(llama(), 2, min_split_bytes=0)
    paired = {entry.module for entry in plan.entries if entry.paired}
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    feed_forward = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert paired == {
        f"model.layers.{layer}.{name}" for layer in range(2) for name in attention + feed_forward
    }


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process(world_size: int) -> None:
    """Two heads of keys are not divisible by four ranks; attention is gathered there."""
    training = Training(
        model=llama, optimizer=models.adamw, data=models.tokens, loss=next_token, num_steps=4
    )
    ours = assemble(shoal.run_in_memory(train_rank, world_size, training, split))
    theirs = one_process(training)
    assert largest_difference(ours, {name: theirs[name] for name in ours}) <= TOLERANCE
