"""Parameters whole on every rank: the optimizer's state too, or each owner's part of it (ZeRO-1).

Gradients are averaged by torch's DistributedDataParallel while backward runs.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import wait_abortable
from shoal.compression.base import Compressor
from shoal.compression.exchange import exchange_for
from shoal.compression.wire import Traffic
from shoal.layouts.base import Layout, World, materialise
from shoal.layouts.buffers import RunningBuffers
from shoal.layouts.gradients import not_reduced
from shoal.model.tied_tensors import persistent_buffers
from shoal.state.shards import OPTIM
from shoal.torch_private.replicated_module import ReplicatedModule, bucket_size
from shoal_proto.errors import InvalidSpec

# Parameters of any dtype may stand at a multiple of this in the memory of their owner.
ALIGNMENT_BYTES = 16
MAX_MESSAGE_BYTES = 1 << 28
"""Gloo copies what it is about to send to another host: no message is larger than this."""


class ReplicatedLayout(Layout):
    """Layout in which every rank holds and steps all, on its own share of the samples.

    A parameter that takes no part in the loss is an error, as in DDP, unless
    `find_unused_parameters` says that this is meant.
    """

    elementwise = False
    strategy = "DDP"
    """Name of the class with which a script chooses this layout."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        """`compressor` keeps what it holds back: the same one for each generation of a member."""
        bucket_mb = bucket_size(bucket_mb)
        materialise(model, world.device)
        self.world = world
        self.data_index, self.data_count = world.rank, world.world_size
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._place()
        self._buffers = RunningBuffers(model)
        names = {parameter: name for name, parameter in self._parameters.items()}
        self.traffic = Traffic()
        self.exchange = exchange_for(
            world.group,
            lambda p: names[p],  # type: ignore[index]
            self.traffic,
            compressor,
        )
        # No comparison of the ranks' parameters: there is nothing in them yet.
        self._ddp = ReplicatedModule(
            model,
            process_group=world.group,
            init_sync=False,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            is_told_of_passes=world.makes_passes,
            unfinished=self._not_reduced,
        )
        self._ddp.register_comm_hook(None, self.exchange.average)
        self.module = self._ddp

    def _place(self) -> None:
        """Move parameters to where they are to lie, before DDP sees them."""

    @property
    def plain(self) -> nn.Module:
        return self._model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    @property
    def held(self) -> Mapping[str, Tensor]:
        return {**self._parameters, **persistent_buffers(self._model)}

    def counts(self, name: str) -> bool:
        return self.world.rank == 0

    def replicas(self, name: str) -> Sequence[int]:
        # Of buffers the first rank's are everybody's.
        return range(self.world.world_size if name in self._parameters else 1)

    def travels(self, name: str) -> bool:
        return False

    def reduce_in_backward(self, reduces: bool) -> None:
        # What DDP's `no_sync` sets; it has to be so in the forward pass too.
        self._ddp.require_backward_grad_sync = reduces

    @property
    def leaves(self) -> Sequence[Tensor]:
        return [each for each in self._parameters.values() if each.requires_grad]

    def note_loss(self, loss: Tensor) -> None:
        self.exchange.losses.note(loss)

    def begin_pass(self, loss: Tensor) -> None:
        self._ddp.begin_backward(loss)
        self.exchange.begin_pass()

    def end_pass(self) -> None:
        self._ddp.end_backward()

    def meets_in_forward(self, *, is_first_step: bool) -> bool:
        return self._ddp.meets_in_forward(is_first_step=is_first_step)

    def begin(self) -> None:
        self.exchange.begin(self.step)
        self._ddp.begin_step()

    def reduce(self) -> None:
        # `synchronised` reports gradients that were not averaged.
        self.unreached = [] if self.exchange.complete else self._without_gradient()
        if self.exchange.complete and self.looks_for_faults:
            self.exchange.check(self.step)

    def _not_reduced(self) -> InvalidSpec:
        return not_reduced(self.step, self._without_gradient(), self.strategy)

    def _without_gradient(self) -> list[str]:
        trained = ((name, p) for name, p in self._parameters.items() if p.requires_grad)
        return [name for name, p in trained if p.grad is None]

    def overflowed(self) -> bool:
        return not self.exchange.has_finite_averages()

    def check(self) -> None:
        """`reduce` has looked at the averages, of which every rank has the same."""

    def stepped(self) -> None:
        """Give everybody the first rank's buffers."""
        self._buffers.share(self.world.group)

    def synchronised(self) -> bool:
        return self.exchange.complete

    def release(self) -> None:
        self._ddp.release()


class Zero1Layout(ReplicatedLayout):
    """Replicated layout in which each parameter is stepped by one rank only, its owner.

    So each rank keeps about 1/n of the optimizer's state. Parameters stay whole: any optimizer
    that treats each of them separately does here what it does in one process.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".

    What an owner has updated travels as one message: its parameters lie in one piece of memory,
    so nothing is packed, and nothing beside it is held. A broadcast for each owner, all under way
    at once, moves each byte to each rank once. An all-gather moves the same only if all parts are
    equal, since Gloo wants them padded to the largest, and a model whose embedding is most of it
    would be sent several times over. On loopback with 4, 40 MB in equal parts: 15 ms to 44 ms
    (2 ranks), 27 to 59 ms (3), 34 to 80 ms (4), and alike below 1 MB.
    """

    strategy = "Zero1"

    def _place(self) -> None:
        n, rank = self.world.world_size, self.world.rank
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        owners = partition([parameter.nbytes for parameter in trained.values()], n)
        self._owner = dict(zip(trained, owners, strict=True))
        self._memory = [
            lay_in_one_piece([p for name, p in trained.items() if self._owner[name] == owner])
            for owner in range(n)
        ]
        self._places = [(parameter, parameter.detach()) for parameter in trained.values()]
        self._owned = {name: p for name, p in trained.items() if self._owner[name] == rank}
        self._others = {name: p for name, p in trained.items() if self._owner[name] != rank}
        self._stepped_by_others: set[str] = set()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._owned

    def counts(self, name: str) -> bool:
        # The first rank counts tensors that no rank steps: frozen parameters and buffers.
        return self._owner.get(name, 0) == self.world.rank

    def travels(self, name: str) -> bool:
        return name.startswith(OPTIM)

    def open(self) -> nn.Module:
        self._take_back()
        return super().open()

    @torch.no_grad()
    def _take_back(self) -> None:
        """Put into the memory of its owner what a script has assigned to a parameter's `.data`:
        what owners send, and others receive, lies there."""
        for parameter, place in self._places:
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter)
                parameter.data = place

    def begin(self) -> None:
        super().begin()
        # The optimizer, which zeroes gradients, does not know these.
        self._forget_gradients_of_others()

    def reduce(self) -> None:
        super().reduce()
        self._stepped_by_others |= {n for n, p in self._others.items() if p.grad is not None}
        self._forget_gradients_of_others()

    @property
    def stepped_by_others(self) -> Collection[str]:
        return self._stepped_by_others

    def stepped(self) -> None:
        super().stepped()
        self._take_back()
        works = [
            dist.broadcast(message, group=self.world.group, group_src=owner, async_op=True)
            for owner, memory in enumerate(self._memory)
            for message in torch.split(memory, MAX_MESSAGE_BYTES)
            if message.numel()
        ]
        for work in works:
            wait_abortable(work, self.world.group)

    def _forget_gradients_of_others(self) -> None:
        for parameter in self._others.values():
            parameter.grad = None


def partition(sizes: Sequence[int], n: int) -> list[int]:
    """Assign each item to one of `n` ranks, such that all own about as much.

    The largest item goes first, each to the rank with least, the lowest of several. No rank
        then owns more than 4/3 of what the best partition gives the fullest (Graham 1969). The same
        sizes always give the same owners.
    """
    owned = [0] * n
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(n), key=owned.__getitem__)
        owners[index] = owner
        owned[owner] += sizes[index]
    return owners


@torch.no_grad()
def lay_in_one_piece(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Give the parameters memory side by side; returns all of it, as bytes.

    What was in them is not kept, but where elements lie in memory (channels last, say) is.
    """
    sizes = [-(-p.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for p in parameters]
    device = parameters[0].device if parameters else None
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    for parameter, part in zip(parameters, torch.split(memory, sizes), strict=True):
        values = part[: parameter.nbytes].view(parameter.dtype)
        parameter.data = values.as_strided(parameter.shape, _strides(parameter))
    return memory


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own, if its elements fill its memory without a gap; else those of one that do"""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    if sum((size - 1) * stride for size, stride in pairs) + 1 == tensor.numel():
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()
