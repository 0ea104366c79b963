"""State that constructors in torch.optim make."""

from torch.optim import Adagrad, Optimizer


def make_first_state(optimizer: Optimizer) -> None:
    """Give an optimizer whose parameters were replaced what its constructor gives them.

    Adagrad's, in torch 2.9 and 2.11; in 2.13 its first step does that, as with all others.
    """
    if type(optimizer) is Adagrad:
        optimizer.state.update(Adagrad(optimizer.param_groups, **optimizer.defaults).state)
