"""What members compare to see that they train the same model with the same optimizer."""

from hashlib import sha256

from torch import nn
from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal.model.tied_tensors import tied


def schema_digest(model: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of all parameters and buffers, in order, and of
    which names stand for one tensor."""
    lines = [
        f"{kind} {name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for kind, tensors in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        )
        for name, tensor in tensors
    ]
    lines += [f"tied {name} {first}" for name, first in tied(model).items()]
    return sha256("\n".join(lines).encode()).hexdigest()


def optimizer_digest(optimizer: Optimizer) -> str:
    """Class and hyper-parameters of the optimizer, in words that a conflict can show a person.

    Taken before training: a schedule that has moved the learning rate since is no conflict.
    """
    parts = optimizers_of(optimizer)
    if list(parts) != [""]:
        return "; ".join(f"{name}: {optimizer_digest(each)}" for name, each in parts.items())
    groups = [
        " ".join(
            f"{key}={value}"
            for key, value in sorted(group.items())
            if key != "params" and isinstance(value, bool | int | float | str | tuple)
        )
        + f" parameters={len(group['params'])}"
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({' | '.join(groups)})"
