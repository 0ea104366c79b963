"""Staleness policies: the treatment of gradients computed on values that are not the newest.

- "damp", the default: slows the optimizer down, more for staler gradients. For SGD the effective
  rate, lr / (1 - momentum), is divided by 2 * staleness + 1: momentum is lowered, and lr only if
  that is not enough. For Adam and Adagrad the rate is divided by sqrt(1 + staleness). Settings
  found with one process also train with several.
- "none": steps on stale gradients unchanged.
- "scale": divides the learning rate by a staleness above 1 (Zhang et al. 2016, arXiv:1511.05950).
- "compensate": corrects a gradient for the change of the values since it was computed (Zheng et al.
  2017, DC-ASGD, arXiv:1609.08326). A push also carries the values that it was computed on: twice
  the bytes.
- "reject": refuses gradients that are too stale; the step is taken again on fresh values.
"""

import math

from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index, as_number
from shoal_proto.v1.optimizer_pb2 import StalenessPolicy

KINDS = ("damp", "none", "scale", "compensate", "reject")
COMPENSATION = 0.04
ADAPTIVE_COMPENSATION = 2.0
DECAY = 0.95
"""DECAY and both strengths are from the paper's experiments on CIFAR-10."""


def to_policy(
    staleness: str, reject_above: int | None, compensation: float | None, *, adaptive: bool
) -> StalenessPolicy:
    """Make the policy for the servers. Raises InvalidSpec for wrong or contradictory options."""
    if staleness not in KINDS:
        raise InvalidSpec(
            "there is no such staleness policy",
            seen=repr(staleness),
            expected=f"one of {', '.join(map(repr, KINDS))}",
        )
    if reject_above is not None:
        reject_above = as_index("reject_above", reject_above)
    if compensation is not None:
        compensation = as_number("compensation", compensation)
        if not 0 <= compensation < math.inf:
            raise InvalidSpec(
                "compensation is out of range",
                seen=f"{compensation:g}",
                expected="a finite number from 0 up",
            )
    if (staleness == "reject" and reject_above is None) or (reject_above or 0) < 0:
        raise InvalidSpec(
            "reject_above is missing or out of range",
            seen=f"staleness={staleness!r} with reject_above={reject_above!r}",
            expected="reject_above=..., a number of updates from 0 up",
        )
    if staleness != "compensate" and compensation is not None:
        raise InvalidSpec(
            "delay compensation belongs to another staleness policy",
            seen=f"staleness={staleness!r} with compensation={compensation!r}",
            expected="staleness='compensate'",
        )
    policy = StalenessPolicy(kind="none" if staleness == "reject" else staleness)
    if reject_above is not None:
        policy.bound = reject_above
    if staleness == "compensate":
        default = ADAPTIVE_COMPENSATION if adaptive else COMPENSATION
        policy.strength = default if compensation is None else compensation
        policy.adaptive = adaptive
        policy.decay = DECAY if adaptive else 0.0
    return policy


def policy_in_words(policy: StalenessPolicy) -> str:
    """Text of the policy in the form of a script's options."""
    options = [f"staleness={policy.kind!r}"]
    if policy.kind == "compensate":
        options += [f"compensation={policy.strength:g}", f"adaptive={policy.adaptive}"]
    if policy.HasField("bound"):
        options.append(f"reject_above={policy.bound}")
    return ", ".join(options)
