"""Which parameters are trained is looked at in each step, also behind many without a change."""

from collections.abc import Callable

import pytest
from torch import nn

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
    "fewer layers": lambda model: model.__delitem__(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_behind_steps_without_one(change: str) -> None:
    model = _model()
    trained = TrainedParameters(model)
    for step in range(3):
        trained.check(step)
    CHANGES[change](model)
    with pytest.raises(InvalidSpec, match="behind 3 committed steps"):
        trained.check(3)


def test_the_same_parameters_in_other_objects_are_trained_as_ever() -> None:
    model = _model()
    trained = TrainedParameters(model)
    for step in range(2):
        trained.check(step)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    trained.check(2)
    model[1].weight.requires_grad_(False)
    with pytest.raises(InvalidSpec):
        trained.check(3)
