"""The training whose result must not depend on who took part in it."""

import torch
from torch import Tensor, nn

from shoal.data.batches import Loader, Order

NUM_SAMPLES, GLOBAL_BATCH, NUM_FEATURES = 1000, 64, 32


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(NUM_FEATURES, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh()),
        *(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def samples() -> tuple[Tensor, Tensor]:
    """Inputs, and targets that a network can learn."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    return inputs, inputs[:, :10].argmax(dim=1)


def one_process(num_steps: int) -> dict[str, Tensor]:
    """The model after so many steps, without any distribution."""
    model = new_model()
    optimizer = new_optimizer(model)
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=GLOBAL_BATCH, num_epochs=1_000_000)
    loader = Loader(samples(), order)
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
