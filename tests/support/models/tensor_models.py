"""Models that tensor parallelism splits, with data and losses for them."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

VOCABULARY, WIDTH, POSITIONS = 37, 12, 5


def numbers() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(24, 6, generator=drawn), torch.randn(24, 3, generator=drawn)


def sequences() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(4)
    shape = (24, POSITIONS, WIDTH)
    return torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    picked = torch.randint(VOCABULARY, (24, POSITIONS + 1), generator=drawn)
    return picked[:, :-1], picked[:, 1:]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def mlp() -> nn.Module:
    """Make a pair of linear modules, and a single one."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.0), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


class Residual(nn.Module):
    """A linear module with a residual connection, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        outputs: Tensor = self.last(torch.tanh(hidden + self.inner(hidden)))
        return outputs


def residual() -> nn.Module:
    return Residual()


def uneven_mlp() -> nn.Module:
    """Make a model with sizes that no number of ranks divides; one dimension has only four
    elements."""
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3)
    )


class Gated(nn.Module):
    """Block as in LLaMA: two linear modules whose outputs are multiplied, before a third."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class CausalAttention(nn.Module):
    """Attention as written by hand: heads by view, sizes from the input's shape."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        num_samples, num_positions, width = x.shape
        shape = (num_samples, num_positions, self.num_heads, width // self.num_heads)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        hidden = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).contiguous().view(x.shape)
        out: Tensor = self.o_proj(mixed)
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalAttention(width, 4)
        self.ln_2, self.mlp = nn.LayerNorm(width), Gated(width, 2 * width + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A GPT with token and position embeddings; the output may share the embedding's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH, padding_idx=30)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def gpt() -> nn.Module:
    return GPT(tied=False)


def tied_gpt() -> nn.Module:
    return GPT(tied=True)


class DeclaredAttention(nn.Module):
    """Attention as in Hugging Face's models: `**kwargs`, heads by view, fewer heads of keys and
    values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.attention_dropout = config.attention_dropout
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, keys = WIDTH, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width)

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (
            p(hidden).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(self.groups, 1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(*hidden.shape[:-1], -1).contiguous()
        return self.o_proj(joined), None


class DeclaredLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.RMSNorm(WIDTH), DeclaredAttention(config)
        self.mlp = Gated(WIDTH, 2 * WIDTH + 1)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        hidden = hidden + self.self_attn(self.norm(hidden), **kwargs)[0]
        out: Tensor = hidden + self.mlp(hidden)
        return out


class DeclaredModel(nn.Module):
    """Model without the head: names in the plan are relative to it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DeclaredLayer(config) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, use_cache=False)
        return hidden


class Declared(nn.Module):
    """A model whose `config` has a plan to split its attention, as Hugging Face's have."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        names = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        self.config = SimpleNamespace(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            attention_dropout=0.0,
            base_model_tp_plan={f"layers.*.self_attn.{name}": how for name, how in names.items()},
        )
        self.config.__dict__.update(changes)
        self.model = DeclaredModel(self.config)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits


def declared() -> nn.Module:
    return Declared()


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, 4, dim_feedforward=17, dropout=0.0, batch_first=True, activation="gelu"
    )


class Decoder(nn.Module):
    """A decoder with cross attention, time first: query and keys differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, dim_feedforward=10, dropout=0.0)
        self.memory = nn.Parameter(torch.randn(3, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        time_first = x.transpose(0, 1)
        memory = self.memory.expand(-1, len(x), -1)
        mask = nn.Transformer.generate_square_subsequent_mask(len(time_first))
        out: Tensor = self.layer(time_first, memory, tgt_mask=mask).transpose(0, 1)
        return out


def decoder() -> nn.Module:
    return Decoder()


def dropping_encoder() -> nn.Module:
    """Make an encoder with dropout on whole values, within the pair, and on attention weights."""
    return nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=17, dropout=0.2, batch_first=True)


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def adamw(parameters: object) -> torch.optim.Optimizer:
    # The bias of attention's keys has a gradient of rounding errors only, as softmax ignores a
    # shift. With the default epsilon Adam would turn them into steps that no other run repeats.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)  # type: ignore[arg-type]
