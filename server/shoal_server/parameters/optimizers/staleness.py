"""Staleness policies: treatment of gradients whose base values have been updated since.

Staleness is the number of updates applied since the values that a gradient was computed on. A
policy may ignore it, divide the learning rate by it, damp the optimizer (`damping`), refuse
gradients that are too stale, or correct the gradient:

Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation",
arXiv:1609.08326, adds the first term of the gradient's Taylor series, with the square of the
gradient in place of the Hessian: g + lambda * g * g * (w_now - w_then). An adaptive lambda differs
per element: lambda_0 / sqrt(m + epsilon), where m is the running mean of g * g.

The member sends w_then along with the gradient. In the paper, the server keeps w_then for each
member instead. That would be a copy of the model per member, to be replicated, moved and put into
snapshots with the shard.
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
    """The policy of one shard, with its state."""

    def __init__(
        self,
        policy: StalenessPolicy,
        kind: str,
        hyper: HyperParameters,
        blocks: Sequence[Tensor],
    ) -> None:
        """`policy` has passed `check_policy`. `kind`: the optimizer's kind. `blocks`: the shard's
        values; they are only read."""
        self._policy = policy
        self._kind = kind
        self._hyper = hyper
        self._blocks = blocks
        # If the objective is maximized, the gradient has the opposite sign.
        self._strength = -policy.strength if hyper.maximize else policy.strength
        self._square: Tensor | None = None
        self._squares: Sequence[Tensor] = ()
        if self.needs_base and policy.adaptive:
            self._square, self._squares = allocate_like(
                blocks, dtype=compute_dtype(blocks[0].dtype)
            )

    @property
    def needs_base(self) -> bool:
        """True if a push must carry the values that its gradient was computed on."""
        return self._policy.kind == "compensate"

    def admit(self, staleness: int, shard_id: int) -> None:
        """Raise StalePush if the policy has a bound, and the staleness is beyond it."""
        if self._policy.HasField("bound") and staleness > self._policy.bound:
            raise StalePush(
                f"the gradient for shard {shard_id} is too stale",
                seen=f"a staleness of {staleness}",
                expected=f"at most {self._policy.bound}",
                fix="Pull the values and compute the gradient again.",
            )

    def scale(self, lr: float, staleness: int) -> float:
        """Return the learning rate for a push of that staleness."""
        if self._policy.kind == "damp":
            return lr * damping(self._kind, self._hyper, staleness).rate
        return lr / max(1, staleness) if self._policy.kind == "scale" else lr

    def momentum(self, staleness: int) -> float:
        """Return the momentum, of SGD or the outer step, for a push of that staleness."""
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
        """Return the gradients for the optimizer's step, and update the running mean of an adaptive
        policy. `bases`: the base values, one tensor per named block; unused unless `needs_base`.

        An element whose correction overflows its type is not corrected. Each operation is rounded
        by itself, so the result does not depend on how threads share a tensor.
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
        """Return the state, not copied."""
        return {} if self._square is None else {"mean_square": self._square}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state` returned. Raises InternalError if `copy_state` does."""
        copy_state(self.state(), state)


def check_policy(policy: StalenessPolicy) -> None:
    """Raise InvalidSpec if the policy is unknown, or a setting is out of range."""
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
