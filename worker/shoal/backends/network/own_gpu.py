"""Which GPU is this worker's, where several workers of a host see the same ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """One worker among those that its launcher runs on this host."""

    rank: int = 0
    world_size: int = 1

    def gpu(self, num_visible: int) -> int | None:
        """The index of its GPU among so many that it sees; None where there is not one for each.

        A worker that sees a single one was given that one by whoever hides the others.
        """
        if num_visible == 1:
            return 0
        return self.rank if num_visible >= max(self.world_size, self.rank + 1) else None

    def check(self, index: int, num_visible: int) -> None:
        """Raise InvalidSpec for a model on the GPU of this index, if that is not this worker's."""
        own = self.gpu(num_visible)
        if own is None:
            raise InvalidSpec(
                "there is no GPU for each worker of this host",
                seen=f"{self.world_size} workers, {num_visible} GPUs",
                expected="a GPU for each worker whose model is on CUDA",
                fix=f"Start {num_visible} workers on this host: shoal run -n {num_visible} ...",
            )
        if index != own and self.world_size > 1:
            raise InvalidSpec(
                "the model is on the GPU of another worker of this host",
                seen=f"cuda:{index}, in worker {self.rank} of {self.world_size}",
                expected=f"cuda:{own}",
                fix='Call model.to("cuda") within `with shoal.join()`: there "cuda" is this'
                " worker's GPU. Before that, $SHOAL_LOCAL_RANK has its number.",
            )


@contextmanager
def own_gpu_used(place: LocalPlace) -> Iterator[None]:
    """Within, this worker's GPU is the one that "cuda" means. Does nothing if there is one or none.

    It stays so behind the block, where a script evaluates what it has trained; but not behind an
    error.
    """
    if not torch.cuda.is_available() or (num_visible := torch.cuda.device_count()) < 2:
        yield
        return
    before, own = torch.cuda.current_device(), place.gpu(num_visible)
    if own is not None and place.world_size > 1:
        torch.cuda.set_device(own)
    try:
        yield
    except BaseException:
        torch.cuda.set_device(before)
        raise


def check_gpu(place: LocalPlace, device: torch.device) -> None:
    """As `LocalPlace.check`, of the device that a model is on; NCCL is to use that one."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    place.check(index, torch.cuda.device_count())
    torch.cuda.set_device(index)
