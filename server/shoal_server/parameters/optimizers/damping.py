"""Damping: smaller steps for stale gradients.

An update that is applied s versions late acts like momentum (Mitliagkas et al. 2016, "Asynchrony
begets Momentum", arXiv:1605.09774), and lowers the largest stable rate. Gradient descent is then
stable below 2 sin(pi / (2 (2 s + 1))) / curvature (Levin and May 1976, "A note on difference-delay
equations"). That is about 1.6 / (2 s + 1) of the bound without delay. So for SGD the effective
rate, lr / (1 - momentum), is divided by 2 s + 1. Momentum is lowered first, since delay acts like
it, and the rate only if that is not enough. A momentum of 1 or more stays.

DiLoCo's outer step is SGD on rounds. Each of s + 1 members pushes its own round, while rate and
momentum are meant for the mean of all. In one round a member may reach the minimum of its loss: the
round is then like a gradient step of rate 1 where the curvature is 1. So the effective rate is
divided by 2 s + 1, and is at most 1 / (s + 1), one round's share of the mean.

Steps of Adam and Adagrad do not grow with the gradient. Their rate is divided by sqrt(1 + s): the
square-root rule for batch size (Malladi et al. 2022, arXiv:2205.10287), with s + 1 gradients as one
batch.
"""

import math
from typing import NamedTuple

from shoal_proto.v1.optimizer_pb2 import HyperParameters

LEAST_MOMENTUM = 1e-6
"""Lower limit of a lowered momentum: at 0, the momentum buffer would not follow the gradients."""


class Damping(NamedTuple):
    rate: float
    """Factor of the learning rate."""
    momentum: float
    """Replaces the optimizer's momentum."""


def damping(kind: str, hyper: HyperParameters, staleness: int) -> Damping:
    """Rate factor and momentum for a gradient. `staleness`: in updates; 0 damps nothing."""
    if not staleness:
        return Damping(1.0, hyper.momentum)
    # A rate of 0 never reaches the bound of 1 / (s + 1): only SGD's rule remains.
    if kind == "outer" and hyper.lr:
        return _outer(hyper, staleness)
    if kind not in ("sgd", "outer"):
        return Damping(1.0 / math.sqrt(1 + staleness), hyper.momentum)
    slower = 2 * staleness + 1
    if not 0 < hyper.momentum < 1:
        return Damping(1.0 / slower, hyper.momentum)
    least = min(LEAST_MOMENTUM, hyper.momentum)
    lowered = max(1 - (1 - hyper.momentum) * slower, least)
    return Damping(min((1 - lowered) / ((1 - hyper.momentum) * slower), 1.0), lowered)


def _outer(hyper: HyperParameters, staleness: int) -> Damping:
    undamped = hyper.lr / (1 - hyper.momentum)
    effective = min(undamped / (2 * staleness + 1), 1 / (1 + staleness))
    lowered = 1 - hyper.lr / effective if effective > hyper.lr else 0.0
    lowered = max(lowered, min(LEAST_MOMENTUM, hyper.momentum))
    return Damping(effective * (1 - lowered) / hyper.lr, lowered)
