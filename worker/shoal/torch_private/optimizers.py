"""Optimizer state that constructors in torch.optim create."""

from torch.optim import Adagrad, Optimizer


def make_first_state(optimizer: Optimizer) -> None:
    """Create the state that the constructor would create, for replaced parameters.

    Only Adagrad in torch 2.9 and 2.11 does so; in 2.13 its first step creates the state.
    """
    if type(optimizer) is Adagrad:
        optimizer.state.update(Adagrad(optimizer.param_groups, **optimizer.defaults).state)
