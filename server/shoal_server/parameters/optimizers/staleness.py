"""Staleness policies: treatment of gradients whose base values have been updated since.

Staleness is the number of updates since the values that a gradient was computed on. A policy may
ignore it, divide the learning rate by it, damp the optimizer (`damping`), refuse stale gradients,
or correct the gradient.

The correction of Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay
Compensation", arXiv:1609.08326, is the first term of the gradient's Taylor series, with the square
of the gradient as Hessian: g + lambda * g * g * (w_now - w_then). An adaptive lambda differs per
element: lambda_0 / sqrt(m + epsilon), with the running mean m of g * g.

The member sends w_then with the gradient. In the paper, the server keeps it, which would be a copy
of the model per member.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal_proto.errors import InvalidSpec, StalePush
from shoal_proto.v1.optimizer_pb2 import HyperParameters, StalenessPolicy
from shoal_server.parameters.optimizers.damping import damping
from shoal_server.parameters.optimizers.tensors import allocate_like, compute_dtype, copy_state

EPSILON = 1e-7
KINDS = ("", "none", "scale", "damp", "compensate")


class Staleness:
    def __init__(
        self,
        policy: StalenessPolicy,
        kind: str,
        hyper: HyperParameters,
        blocks: Sequence[Tensor],
    ) -> None:
        """`policy` has passed `check_policy`. `kind`: the optimizer's kind. `blocks`: the shard's
        values, which are only read."""
        self._policy = policy
        self._kind = kind
        self._hyper = hyper
        self._blocks = blocks
        # The gradient of a maximized objective has the opposite sign.
        self._strength = -policy.strength if hyper.maximize else policy.strength
        self._square: Tensor | None = None
        self._squares: Sequence[Tensor] = ()
        if self.needs_base and policy.adaptive:
            self._square, self._squares = allocate_like(
                blocks, dtype=compute_dtype(blocks[0].dtype)
            )

    @property
    def needs_base(self) -> bool:
        """True if a push must carry its base values."""
        return self._policy.kind == "compensate"

    def admit(self, staleness: int, shard_id: int) -> None:
        if self._policy.HasField("bound") and staleness > self._policy.bound:
            raise StalePush(
                f"the gradient for shard {shard_id} is too stale",
                seen=f"a staleness of {staleness}",
                expected=f"at most {self._policy.bound}",
                fix="Pull the values and compute the gradient again.",
            )

    def scale(self, lr: float, staleness: int) -> float:
        if self._policy.kind == "damp":
            return lr * damping(self._kind, self._hyper, staleness).rate
        return lr / max(1, staleness) if self._policy.kind == "scale" else lr

    def momentum(self, staleness: int) -> float:
        """Momentum of SGD or the outer step for a push of that staleness."""
        if self._policy.kind == "damp":
            return damping(self._kind, self._hyper, staleness).momentum
        return self._hyper.momentum

    def correct(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        bases: Sequence[Tensor],
        staleness: int,
    ) -> Sequence[Tensor]:
        """Gradients for the optimizer's step; updates an adaptive policy's running mean. `bases`:
        base values per named block, unused unless `needs_base`.

        An element whose correction overflows stays uncorrected. Each operation is rounded by
        itself, so threads do not affect the result.
        """
        if not self.needs_base:
            return gradients
        corrected = []
        for b, gradient, base in zip(blocks, gradients, bases, strict=True):
            wide_gradient = gradient.to(compute_dtype(gradient.dtype))
            squared = wide_gradient * wide_gradient
            strength: Tensor | float = self._strength
            if self._squares:
                decay = self._policy.decay
                mean = self._squares[b].mul_(decay).add_(squared * (1 - decay))
                mean.clamp_(max=torch.finfo(wide_gradient.dtype).max)
                strength = self._strength / (mean + EPSILON).sqrt()
            if staleness:
                change = self._blocks[b].to(wide_gradient.dtype) - base.to(wide_gradient.dtype)
                shifted = (wide_gradient + squared * strength * change).to(gradient.dtype)
                corrected.append(torch.where(shifted.isfinite(), shifted, gradient))
        return corrected or gradients

    def state(self) -> Mapping[str, Tensor]:
        return {} if self._square is None else {"mean_square": self._square}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state(self.state(), state)


def check_policy(policy: StalenessPolicy) -> None:
    """Raise InvalidSpec for an unknown policy, or a setting out of range."""
    if policy.kind not in KINDS:
        raise InvalidSpec(
            "no such staleness policy",
            seen=repr(policy.kind),
            expected=", ".join(map(repr, KINDS[1:])),
        )
    if not (0 <= policy.strength < math.inf and 0 <= policy.decay < 1):
        raise InvalidSpec(
            "the delay compensation is out of range",
            seen=f"strength {policy.strength:g}, decay {policy.decay:g}",
            expected="a finite strength from 0 up, and 0 <= decay < 1",
        )
