"""Checks for what cannot be trained with compressed gradients."""

from torch import nn

from shoal.model.several import SeveralModels
from shoal_proto.errors import InvalidSpec


def refuse_compressed_weights(compression: object) -> None:
    """Raise InvalidSpec for losses with weights of their own if gradients are compressed."""
    if compression is not None:
        raise InvalidSpec(
            "losses with weights of their own are not trained with compressed gradients",
            seen=f"session.backward(loss, weight=...) and compression {compression}",
            expected="one of the two: values that compression leaves out of a step are added to the"
            " next step, which is divided by another sum of weights",
        )


def refuse_compressed_models(compression: object, model: nn.Module) -> None:
    """Raise InvalidSpec for several models if gradients are compressed."""
    if compression is not None and isinstance(model, SeveralModels):
        raise InvalidSpec(
            "several models are not trained with compressed gradients",
            seen=f"{len(model)} models and compression {compression}",
            expected="one of the two",
        )
