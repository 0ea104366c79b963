"""Damping: smaller steps for stale gradients.

Updates that are applied `staleness` versions late act like momentum (Mitliagkas et al. 2016,
"Asynchrony begets Momentum", arXiv:1605.09774), and they narrow what is stable: gradient descent
delayed by s updates diverges from a rate of 2 sin(pi / (2 (2 s + 1))) / curvature on, where without
delay it is 2 / curvature (Levin and May 1976, "A note on difference-delay equations"): about 1.6
times 1 / (2 s + 1) of it. So for SGD the effective rate, lr / (1 - momentum), is divided by
2 s + 1: momentum is lowered first, since delay acts like it; when none is left, the rate is.

DiLoCo's outer step is SGD on rounds instead of gradients. Each of s + 1 members pushes its own
round, while rate and momentum are meant for the mean of all. A round may go all the way to its
minimum, as a gradient of curvature 1 would; delayed by s, that is unstable above an effective rate
of 2 sin(pi / (2 (2 s + 1))). So it is at most 1 / (s + 1): each round's share of their mean.

The steps of Adam and Adagrad do not grow with the gradient. For them the rate is divided by
sqrt(1 + s): the square-root rule for adaptive optimizers and batch size (Malladi et al. 2022,
arXiv:2205.10287), with the gradients of s + 1 members as one batch.

A gradient that is not stale is not damped at all.
"""

import math
from typing import NamedTuple

from shoal_proto.v1.optimizer_pb2 import HyperParameters

LEAST_MOMENTUM = 1e-6
"""Not 0, so that the momentum buffer still follows the gradients."""


class Damping(NamedTuple):
    rate: float
    """Factor of the learning rate."""
    momentum: float
    """Momentum to use instead of the optimizer's own."""


def damping(kind: str, hyper: HyperParameters, staleness: int) -> Damping:
    """Return rate factor and momentum for a gradient of that staleness, in updates."""
    if not staleness:
        return Damping(1.0, hyper.momentum)
    if kind == "outer":
        return _outer(hyper, staleness)
    if kind != "sgd":
        return Damping(1.0 / math.sqrt(1 + staleness), hyper.momentum)
    slower = 2 * staleness + 1
    if not 0 < hyper.momentum < 1:
        return Damping(1.0 / slower, hyper.momentum)
    least = min(LEAST_MOMENTUM, hyper.momentum)
    left = max(1 - (1 - hyper.momentum) * slower, least)
    return Damping(min((1 - left) / ((1 - hyper.momentum) * slower), 1.0), left)


def _outer(hyper: HyperParameters, staleness: int) -> Damping:
    asked = hyper.lr / (1 - hyper.momentum)
    effective = min(asked / (2 * staleness + 1), 1 / (1 + staleness))
    # Momentum is lowered first; the rate is lowered only if that is not enough.
    left = 1 - hyper.lr / effective if effective > hyper.lr else 0.0
    left = max(left, min(LEAST_MOMENTUM, hyper.momentum))
    return Damping(effective * (1 - left) / hyper.lr, left)
