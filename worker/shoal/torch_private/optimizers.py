"""Optimizer state that constructors in torch.optim create."""

from torch.optim import Adagrad, Optimizer


def make_first_state(optimizer: Optimizer) -> None:
    """Create the state that the constructor would create, for replaced parameters.

    Only the constructor of Adagrad creates state, in torch 2.9 and 2.11. In 2.13 Adagrad's first
    step creates it.
    """
    if type(optimizer) is Adagrad:
        optimizer.state.update(Adagrad(optimizer.param_groups, **optimizer.defaults).state)
