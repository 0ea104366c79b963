"""Errors of members with losses or gradients that are not finite, and of the other members."""

from collections.abc import Sequence

from shoal_proto.errors import GenerationBroken, NonFiniteGradient

OWN = "NaN or Inf in this member's own gradient"


def loss_not_finite(step: int, *, seen: str) -> NonFiniteGradient:
    """Build the error of a member with a loss that is not finite. `step`: number of committed
    steps."""
    return _not_finite("the loss", step, seen=seen, expected="a finite number")


def gradient_not_finite(name: str, step: int, *, seen: str = OWN) -> NonFiniteGradient:
    """Build the error of a member that finds a NaN or Inf in the gradient of this parameter."""
    return _not_finite(f"the gradient of {name}", step, seen=seen, parameter=name)


def sum_not_finite(name: str, step: int) -> NonFiniteGradient:
    """Build the error that all members raise if only the sum of their gradients is not finite.
    `name`: a parameter in which this member sees the overflow, or empty."""
    return _not_finite(
        "the sum of all members' gradients",
        step,
        seen="an overflow; each member's own gradient was finite",
        fix="Scale the loss down or use a wider dtype.",
        parameter=name,
    )


def others_not_finite(faults: Sequence[object], step: int) -> GenerationBroken:
    """Build the error of a member with finite gradients. `faults`: true for ranks at fault, by
    rank."""
    ranks = [str(rank) for rank, fault in enumerate(faults) if fault]
    if len(ranks) == 1:
        return GenerationBroken(
            f"the gradient of rank {ranks[0]} is not finite at step {step}; rank {ranks[0]} leaves"
        )
    return GenerationBroken(
        f"the gradients of ranks {', '.join(ranks)} are not finite at step {step}; these members"
        " leave"
    )


def _not_finite(
    what: str,
    step: int,
    *,
    seen: str,
    expected: str = "finite numbers",
    fix: str = "Lower the learning rate, clip gradients, or look at the batch's samples.",
    parameter: str = "",
) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"{what} is not finite at step {step}",
        seen=seen,
        expected=expected,
        fix=fix,
        details={"parameter": parameter, "step": str(step)},
    )
