"""The training whose result must not depend on who took part in it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from shoal.data.batches import Loader
from shoal.data.order import Order

NUM_SAMPLES, GLOBAL_BATCH, NUM_TOKENS, VOCABULARY, WIDTH = 1000, 64, 6, 41, 32
PERIOD_STEPS = 400
"""Period of the learning-rate schedule, up and down."""


class TiedModel(nn.Module):
    """Predicts tokens from tokens; the output shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.first(hidden)
        logits: Tensor = self.head(self.second(self.norm(hidden)))
        return logits


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return TiedModel()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def new_schedule(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, PERIOD_STEPS, eta_min=0.002)


def samples() -> tuple[Tensor, Tensor]:
    """Tokens, and the ones that follow them."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (NUM_SAMPLES, NUM_TOKENS + 1), generator=generator)
    drawn = steps.cumsum(1) % VOCABULARY
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def one_process(num_steps: int) -> dict[str, Tensor]:
    """The model after so many steps, without any distribution."""
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=GLOBAL_BATCH, num_epochs=1_000_000)
    loader = Loader(samples(), order)
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        loss_of(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        schedule.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
