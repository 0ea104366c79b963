"""Models that are cut into stages, with data and losses for them."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, POSITIONS = 11, 8, 6


def numbers() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(30, 5, generator=drawn), torch.randn(30, 2, generator=drawn)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    picked = torch.randint(VOCABULARY, (30, POSITIONS), generator=drawn)
    return picked[:, :-1], picked[:, 1:]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def perceptron() -> nn.Module:
    """Make a model of four linear layers, in nested containers."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 9), nn.Tanh())),
        nn.Linear(9, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    )


def rectified() -> nn.Module:
    """Make a model of linear layers whose activations are changed in place."""
    widths = (5, 7, 9, 6, 2)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(part for each in layers for part in (each, nn.ReLU(inplace=True))))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed = self.mix(self.norm(x))
        if mask is not None:
            mixed = mask @ mixed
        out: Tensor = x + mixed + self.mlp(x)
        return out


class Transformer(nn.Module):
    """A transformer as users write it: with sizes of the input, an assertion, and a mask in a
    buffer. The first block's output is used again at the end. If `tied`, the output shares the
    embedding's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.scale = nn.Parameter(torch.ones(POSITIONS, 1))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.ones(POSITIONS, POSITIONS).tril() / POSITIONS)

    def forward(self, ids: Tensor, scores: Tensor | None = None) -> Tensor:
        _, length = ids.shape
        assert length <= POSITIONS, f"{length} positions"
        places = torch.arange(length, device=ids.device)
        x = (self.wte(ids) + self.wpe(places)) * self.scale[:length]
        if scores is not None:
            x = x * scores
        early = x
        for index, block in enumerate(self.blocks):
            x = block(x, self.mask[:length, :length])
            if index == 0:
                early = x
        logits: Tensor = self.head(self.norm(x + early))
        return logits


def transformer() -> nn.Module:
    return Transformer(tied=False)


def tied_transformer() -> nn.Module:
    return Transformer(tied=True)


class Counted(nn.Module):
    """A model with batch statistics and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


class Noisy(nn.Module):
    """A model that uses the same noise twice, and changes a value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        shifted = x.clone()
        shifted.add_(1)
        shifted += noise
        out: Tensor = self.second(self.first(shifted)) - noise - shifted
        return out


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, object]:
        hidden = self.first(x)
        return {"out": self.second(hidden), "parts": [hidden.argmax(-1), 7, None]}


class Dependent(nn.Module):
    """Model whose control flow depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        out: Tensor = self.second(x)
        return out


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def adamw(parameters: object) -> torch.optim.Optimizer:
    # With the default epsilon, gradients that are only rounding errors would make steps.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)  # type: ignore[arg-type]


def normalised() -> nn.Module:
    """Make a model with spectral norms, whose estimates each forward pass improves."""
    layers = [spectral_norm(nn.Linear(5, 7)), nn.Tanh(), spectral_norm(nn.Linear(7, 6)), nn.Tanh()]
    return nn.Sequential(*layers, Recomputed(spectral_norm(nn.Linear(6, 6))), nn.Linear(6, 2))


class Recomputed(nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Counting(nn.Module):
    """A layer with a buffer that each forward pass changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            kept = self.get_buffer("kept")
            if self.kind == "passes, in another tensor":
                self.kept = kept + 1
            elif self.kind == "passes, unseen":
                kept.data.add_(1)
            else:
                kept.add_({"passes": 1, "samples": len(x), "values": x.detach().mean()}[self.kind])
        return x + 0 * self.get_buffer("kept")


def counting(kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), Counting(kind), nn.Linear(4, 2))
