"""Models whose tensors have several names, with data for them."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from support.models import tensor_models
from support.models.tensor_models import POSITIONS, VOCABULARY, WIDTH
from torch import Tensor, nn

from shoal.data.batches import Loader
from shoal.data.order import Order


class TwoNames(nn.Module):
    """A layer with one weight and one buffer, each under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(2 * WIDTH + 1, WIDTH) * 0.1)
        self.up = self.down
        self.register_buffer("before", torch.full((WIDTH,), 0.5))
        self.register_buffer("behind", self.before)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x * self.before, self.down))
        return F.linear(hidden, self.up.t()) * self.behind


class Knotted(nn.Module):
    """A GPT of two blocks with shared weights.

    The embedding, the output and one layer between them share a weight, one layer has a weight
    under two names, and one layer runs twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.guess = nn.Linear(WIDTH, VOCABULARY)
        self.guess.weight = self.wte.weight
        self.back = nn.Linear(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(tensor_models.Block(WIDTH) for _ in range(2))
        self.two_names = TwoNames()
        self.again = self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = x + self.again(self.blocks[0](x))
        x = x + self.back(torch.tanh(self.guess(x)))
        x = x + self.two_names(self.blocks[1](x))
        logits: Tensor = self.head(self.last(x))
        return logits


TIES = {
    "guess.weight": "wte.weight",
    "head.weight": "wte.weight",
    "two_names.up": "two_names.down",
    "two_names.behind": "two_names.before",
    "last.weight": "again.weight",
    "last.bias": "again.bias",
}


def knotted(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Knotted()
    return model, tensor_models.adamw(model.parameters())


def loader() -> Loader:
    """Make a loader with batches of 10, and of 4 at the end of an epoch: uneven on 3 ranks."""
    order = Order(num_samples=24, global_batch_size=10, num_epochs=20)
    return Loader(tensor_models.tokens(), order)
