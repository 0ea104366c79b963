"""Errors that torch raises in a step, reworded for the script's author."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.data.share_sizes import remedies_of_one_sample
from shoal.torch_private.tensors import mixes_parts_and_wholes
from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class StepState:
    """The step in which the error was raised."""

    strategy: str
    step: int
    num_samples: int | None
    """Size of this member's share; None if the script makes its own batches."""
    syncs_batchnorm: bool
    """True if the strategy could train with sync_batchnorm=True."""


def refusal_of(error: BaseException, state: StepState) -> InvalidSpec | None:
    """Return the refusal to raise instead of an error of torch's; None for other errors."""
    if mixes_parts_and_wholes(error):
        return _parts_and_wholes(state)
    if not isinstance(error, RuntimeError | ValueError):
        return None
    text = str(error)
    return next((refuse(state) for seen, refuse in _REFUSALS.items() if seen in text), None)


def _one_sample(state: StepState) -> InvalidSpec:
    share = "" if state.num_samples is None else f", in a share of {state.num_samples}"
    return InvalidSpec(
        f"BatchNorm cannot normalise a single sample, in step {state.step}",
        seen=f"one value for each channel{share}: the more members, the smaller are their shares",
        expected="two samples or more in each member's share of each batch, or part of it",
        fix=remedies_of_one_sample(syncs_batchnorm=state.syncs_batchnorm),
    )


def _gradient_twice(state: StepState) -> InvalidSpec:
    return InvalidSpec(
        f"a parameter got its gradient twice in one backward pass, in step {state.step}",
        seen=f"a backward pass within a backward pass under {state.strategy}, of a block that is"
        " used more than once",
        expected="one gradient of each parameter in a pass",
        fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False) to compute a block"
        " again, or strategy='fsdp'.",
    )


def _second_backward(state: StepState) -> InvalidSpec:
    return InvalidSpec(
        f"two backward passes of one forward pass, in step {state.step}",
        seen="session.backward of a loss whose graph an earlier backward has freed",
        expected="one session.backward for the outputs of a forward pass",
        fix="Pass the sum of the losses to session.backward, or call the model once for each.",
    )


def _written_in_place(state: StepState) -> InvalidSpec:
    return InvalidSpec(
        f"a tensor was written to between the forward and the backward pass, in step {state.step}",
        seen="a write to weights, buffers or activations that the backward pass needs unchanged",
        expected="session.backward before session.update or the script writes to them",
        fix="Call the model again for a loss after session.update; write in place to copies."
        " torch.autograd.set_detect_anomaly(True) names the operation.",
    )


def _parts_and_wholes(state: StepState) -> InvalidSpec:
    return InvalidSpec(
        "the step computed with parameters that are sharded over the members under"
        f" {state.strategy}",
        seen="a parameter, a gradient or a module of the model, used together with a whole tensor",
        expected="a call of the model that session.distribute returned, which gathers them",
        fix="Compute terms of parameters in the model's forward(), and clip with"
        " session.clip_grad_norm. ddp and zero1 leave parameters whole.",
    )


_REFUSALS: dict[str, Callable[[StepState], InvalidSpec]] = {
    "Expected more than 1 value per channel when training": _one_sample,
    "Expected to mark a variable ready only once": _gradient_twice,
    "Trying to backward through the graph a second time": _second_backward,
    "has been modified by an inplace operation": _written_in_place,
}
