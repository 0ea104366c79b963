"""Use of checkpoints by a program with torch and without Shoal.

As a program: plain_torch.py READ WRITTEN, where READ/<optimizer> is a checkpoint. Loads each in all
of torch's ways, trains on, and writes the results to WRITTEN.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.99)),
    "sgd": lambda model: torch.optim.SGD(
        [
            {"params": [model.first.weight], "lr": 0.05},
            {"params": [p for n, p in model.named_parameters() if n != "first.weight"]},
        ],
        lr=0.02,
        momentum=0.9,
    ),
}


class Net(nn.Module):
    """A model with sizes that no rank count divides, buffers, a frozen parameter, and two names for
    one parameter and for one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.second.weight
        self.last = nn.Linear(7, 3)
        self.last.bias.requires_grad_(False)
        self.register_buffer("shift", torch.full((7,), 0.25))
        self.second.register_buffer("shift", self.shift)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        outputs: Tensor = self.last(self.again(torch.tanh(self.second(hidden + self.shift))))
        return outputs


def make(optimizer: str, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, OPTIMIZERS[optimizer](model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(10, 6, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optimizer_state, **more}, checkpoint_id=path, no_dist=True)


def load_and_go_on(path: Path, optimizer_name: str, steps: range) -> dict[str, Tensor]:
    model, optimizer = make(optimizer_name, seed=9)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    train(model, optimizer, steps)
    return dict(model.state_dict())


def main(read: Path, written: Path) -> None:
    for name in OPTIMIZERS:
        model, _ = make(name, seed=9)
        # Copies into the model's own tensors.
        dcp.load({"model": model.state_dict()}, checkpoint_id=read / name, no_dist=True)
        torch.save(model.state_dict(), written / f"{name}.model")
        torch.save(load_and_go_on(read / name, name, range(3, 5)), written / f"{name}.went_on")
        dcp_to_torch_save(read / name, written / f"{name}.converted")


if __name__ == "__main__":
    # From here on an import of Shoal fails, even if it is installed.
    sys.modules["shoal"] = sys.modules["shoal_proto"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
