"""Models and samples of the cases: the same weights and samples in every process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from shoal.data.order import Order

CLASSES = 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its samples, on the host."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    batch: int
    optimizer: str = "momentum"
    """A name in `OPTIMIZERS`."""
    epochs: int = 100_000
    """More epochs than any case trains: it ends at its last step or by its file."""
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def build(self, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model on the device, and its optimizer."""
        torch.manual_seed(3)
        model = self.make().to(device)
        return model, OPTIMIZERS[self.optimizer](model)

    def order(self, num_samples: int) -> Order:
        """The order of all samples of all steps."""
        return Order(num_samples=num_samples, global_batch_size=self.batch, num_epochs=self.epochs)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    # A rate with which a loss falls visibly in some tens of steps.
    "fast sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    # With this epsilon, gradients that are only rounding errors make no steps.
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
}


def chain(width: int, depth: int) -> nn.Module:
    """Layers that can be cut at any point, with widths that few numbers divide."""
    layers: list[nn.Module] = [nn.Linear(20, width), nn.Tanh()]
    for _ in range(depth):
        layers += [nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Residual(nn.Module):
    """Pairs of layers in which `torch.compile` finds something to compile, whatever wraps them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, CLASSES)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = hidden + self.dropout(self.down(torch.tanh(self.up(hidden))))
        outputs: Tensor = self.last(hidden)
        return outputs


def residual(width: int, dropout: float) -> Task:
    """A task for `torch.compile`."""
    return Task(make=partial(Residual, width, dropout), data=vectors, batch=24)


def vectors(num_samples: int = 96) -> tuple[Tensor, Tensor]:
    """Inputs of 20 numbers and their classes."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(num_samples, 20, generator=generator)
    return inputs, (inputs[:, :3] > 0).long() @ torch.tensor([4, 2, 1])


def chains(width: int, depth: int = 2, *, optimizer: str = "momentum") -> Task:
    """A task with such a chain of layers."""
    return Task(make=partial(chain, width, depth), data=vectors, batch=24, optimizer=optimizer)


def chain_of(num_bytes: int, *, optimizer: str = "momentum") -> Task:
    """A task whose parameters take about so many bytes."""
    return chains(max(16, round((num_bytes / 4 / 2) ** 0.5)), depth=1, optimizer=optimizer)


class Tied(nn.Sequential):
    """An embedding, layers, and an output that shares the embedding's weight."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__(
            nn.Embedding(vocabulary, width),
            *(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
            nn.Linear(width, vocabulary, bias=False),
        )
        nn.init.normal_(self[0].weight, std=width**-0.5)
        self[5].weight = self[0].weight


def words(vocabulary: int, positions: int = 0, num_samples: int = 64) -> tuple[Tensor, Tensor]:
    """Tokens and their successors: single tokens, or sequences if `positions` is given."""
    generator = torch.Generator().manual_seed(12)
    drawn = torch.randint(vocabulary, (num_samples, (positions or 1) + 1), generator=generator)
    return (drawn[:, :-1], drawn[:, 1:]) if positions else (drawn[:, 0], drawn[:, 1])


def tied(vocabulary: int, width: int) -> Task:
    """A task for a pipeline whose first and last stage share a weight."""
    return Task(make=partial(Tied, vocabulary, width), data=partial(words, vocabulary), batch=8)


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:  # noqa: N803
        batch, length, width = x_BTW.shape
        parts = self.attend(self.before(x_BTW)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTW = x_BTW + self.project(  # noqa: N806
            attended.transpose(1, 2).reshape(batch, length, width)
        )
        hidden = nn.functional.gelu(self.up(self.between(x_BTW)), approximate="tanh")
        outputs: Tensor = x_BTW + self.down(hidden)
        return outputs


class Gpt(nn.Module):
    """A GPT whose output shares the embedding's weight: 124 M parameters at 12 x 768."""

    def __init__(self, vocabulary: int, positions: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTW = self.tokens(tokens_BT) + self.places(places)  # noqa: N806
        for block in self.blocks:
            x_BTW = block(x_BTW)  # noqa: N806
        logits: Tensor = self.head(self.norm(x_BTW))
        return logits


def next_word(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over all positions."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt(*, full: bool) -> Task:
    """The model whose steps are timed: 124 M parameters in full, otherwise a few thousand."""
    vocabulary, positions, width, depth = (50304, 1024, 768, 12) if full else (96, 8, 16, 2)
    return Task(
        make=partial(Gpt, vocabulary, positions, width, depth),
        data=partial(words, vocabulary, positions),
        batch=8,
        loss=next_word,
        optimizer="fused adamw",
    )


class Normed(nn.Module):
    """Convolutions, each followed by a BatchNorm."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(depth):
            channels = width if number else 3
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
            layers.append(nn.ReLU())
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layers(images).mean((2, 3)))
        return outputs


def images(size: int) -> tuple[Tensor, Tensor]:
    """Random images with random classes."""
    generator = torch.Generator().manual_seed(13)
    drawn = torch.randn(64, 3, size, size, generator=generator)
    return drawn, torch.randint(CLASSES, (64,), generator=generator)


def normed(*, full: bool) -> Task:
    """A task with as many BatchNorm layers as ResNet-50 has."""
    width, depth, size = (64, 53, 32) if full else (4, 3, 8)
    return Task(make=partial(Normed, width, depth), data=partial(images, size), batch=16)
