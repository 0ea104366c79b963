"""The trained parameters are checked in each step, even after many steps without a change."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.backends.in_memory.run import run_in_memory
from shoal.model.trained_parameters import TrainedParameters
from shoal_proto.errors import InvalidSpec


def _model() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    return nn.Sequential(block, nn.Linear(2, 2), nn.Identity())


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a flag": lambda model: model[1].bias.requires_grad_(False),
    "a layer within a block": lambda model: model[0].__setitem__(0, nn.Linear(2, 2)),
    "a layer in one without": lambda model: model[2].add_module("more", nn.Linear(2, 2)),
    "a layer in a new table": lambda model: setattr(
        model[0], "_modules", {"0": model[0][0], "1": nn.Linear(2, 2)}
    ),
    "a parameter that is not trained": lambda model: setattr(
        model[1], "weight", nn.Parameter(model[1].weight.detach(), requires_grad=False)
    ),
    "another parameter": lambda model: setattr(
        model[1], "weight", nn.Parameter(model[1].weight.detach().clone())
    ),
    "a parameter of another layer": lambda model: setattr(model[1], "weight", model[0][0].weight),
    "fewer layers": lambda model: model.__delitem__(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_after_steps_without_one(change: str) -> None:
    model = _model()
    trained = TrainedParameters(model)
    for step in range(3):
        trained.check(step)
    CHANGES[change](model)
    with pytest.raises(InvalidSpec, match="after 3 committed steps"):
        trained.check(3)


def test_gathered_parameters_count_as_the_sharded_ones() -> None:
    """A forward pass between two steps leaves whole parameters in the place of their rows."""

    def body() -> None:
        model = _model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
        trained = TrainedParameters(model)
        trained.check(0)
        cut = model[1].weight
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert model[1].weight is not cut
        trained.check(1)
        model[1].weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(InvalidSpec, match=r"other parameters than.*a new '1.weight', after 2"):
            trained.check(2)

    run_in_memory(body, 2)
