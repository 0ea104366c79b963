"""A member that has a part of the model does not pass it off as the whole."""

import pickle

import pytest
import torch
from support.collectives.strategy_runs import enter
from support.training import equality

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import InvalidSpec

WORLD_SIZE = 2


def shown_to_script(name: str) -> None:
    """Check what a rank gives to a script that saves only on that rank."""
    strategy = equality.made(name, WORLD_SIZE)()
    assert isinstance(strategy, ShardedStrategy)
    model = enter(equality.run_of("sgd"), strategy).model
    if name == "zero1":
        state = model.state_dict()
        assert set(state) == set(strategy.state_dict())
        assert all(type(each) is torch.Tensor for each in state.values())
    else:
        with pytest.raises(InvalidSpec, match=r"part of the model; saw .* session.state_dict\(\)"):
            model.state_dict()
        with pytest.raises(InvalidSpec, match="part of the model"):
            pickle.dumps(model)
    strategy.close()


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid"])
def test_a_script_that_saves_its_model_saves_the_whole_or_is_refused(name: str) -> None:
    """Regression: `torch.save(model.state_dict())` on the first rank saved only that rank's
    part."""
    run_in_memory(shown_to_script, WORLD_SIZE, name)


def test_a_model_that_stays_whole_may_be_saved() -> None:
    def body() -> list[str]:
        strategy = shoal.TensorParallel(copies=0)
        return list(enter(equality.run_of("sgd"), strategy).model.state_dict())

    for names in run_in_memory(body, WORLD_SIZE):
        assert names == list(equality.build("sgd", 0)[0].state_dict())
