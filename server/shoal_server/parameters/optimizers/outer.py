"""The outer step of DiLoCo, for members that push the change of their values.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105. In place of a gradient, a member pushes the values at its round's start minus
those that its own optimizer has reached. The step is SGD with momentum, Nesterov's or not; 16-bit
values are computed in float32.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shoal_proto.v1.optimizer_pb2 import HyperParameters
from shoal_server.parameters.optimizers.tensors import allocate_like, compute_dtype, copy_state


class Outer:
    """SGD in separate operations, each rounded by itself. So the result equals the outer step of
    strategy "diloco" to the last bit."""

    def __init__(self, hyper: HyperParameters, blocks: Sequence[Tensor]) -> None:
        self._hyper = hyper
        self._blocks = blocks
        self._momentum: Tensor | None = None
        self._buffers: Sequence[Tensor] = ()
        if hyper.momentum != 0.0:
            self._momentum, self._buffers = allocate_like(
                blocks, dtype=compute_dtype(blocks[0].dtype)
            )

    def step(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        momentum: float | None = None,
    ) -> None:
        momentum = self._hyper.momentum if momentum is None else momentum
        for b, gradient in zip(blocks, gradients, strict=True):
            ahead = gradient.to(compute_dtype(gradient.dtype))
            if self._buffers:
                # The buffer starts at 0, so the first step is not a special case.
                velocity = self._buffers[b].mul_(momentum).add_(ahead)
                ahead = ahead + velocity * momentum if self._hyper.nesterov else velocity
            value = self._blocks[b]
            value.copy_(value.to(ahead.dtype) - ahead * lr)

    def state(self) -> Mapping[str, Tensor]:
        return {} if self._momentum is None else {"momentum_buffer": self._momentum}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state(self.state(), state)
