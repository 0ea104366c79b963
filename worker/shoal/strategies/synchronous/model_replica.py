"""A whole model in one generation, whose gradients are averaged with the other members'."""

from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from shoal.compression.gradient_exchange import GradientExchange
from shoal.layouts.buffers import RunningBuffers
from shoal.model.gradients import watch_parameters
from shoal.torch_private.replicated_module import ReplicatedModule


class ModelReplica:
    """Torch's wrapper, what averages its gradients, and the running statistics that are shared."""

    def __init__(self, ddp: ReplicatedModule, exchange: GradientExchange) -> None:
        self.ddp = ddp
        self.exchange = exchange
        self.running = RunningBuffers(ddp.module)
        self._watching: list[RemovableHandle] = []

    def watch(self, ours: Callable[[], bool]) -> None:
        """From here on gradients are averaged, and only those that are `ours` may come."""
        self._watching = watch_parameters(self.ddp.module.parameters(), ours)
        self.ddp.register_comm_hook(None, self.exchange.average)

    def release(self) -> None:
        """Let go of the model and the group."""
        while self._watching:
            self._watching.pop().remove()
        self.ddp.release()
