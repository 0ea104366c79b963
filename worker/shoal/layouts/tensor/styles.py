"""Modules that can be split: their styles, and the dimensions of parameters to cut."""

from collections.abc import Mapping

from torch import nn

from shoal.layouts.tensor.plan import COLUMN, HEADS, MASK, ROW, VOCAB
from shoal.torch_private.modules import has_hooks, parameter_table, projects_together

STYLES: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: (COLUMN, ROW),
    nn.Embedding: (VOCAB, COLUMN),
    nn.MultiheadAttention: (HEADS,),
}
CUT_DIMS: Mapping[tuple[type[nn.Module], str], Mapping[str, int]] = {
    (nn.Linear, COLUMN): {"weight": 0, "bias": 0},
    (nn.Linear, ROW): {"weight": 1},
    (nn.Embedding, VOCAB): {"weight": 0},
    (nn.Embedding, COLUMN): {"weight": 1},
    (nn.MultiheadAttention, HEADS): {"in_proj_weight": 0, "in_proj_bias": 0, "out_proj.weight": 1},
    (nn.Dropout, MASK): {},
}


def reason_to_keep_whole(module: nn.Module) -> str:
    """Return the reason why a module of a class in STYLES must stay whole; empty if it need not."""
    if has_hooks(module):
        return "it has hooks, which would see a part"
    if isinstance(module, nn.MultiheadAttention):
        plain = projects_together(module) and module.bias_k is None and not module.add_zero_attn
        return "" if plain else "it has kdim, vdim, add_bias_kv or add_zero_attn"
    if "weight" not in parameter_table(module):
        return "its weight is computed"
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return "" if plain else "max_norm, scale_grad_by_freq and sparse need the whole table"
    return ""
