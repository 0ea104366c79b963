"""Choice of a worker's GPU on a host with several workers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal_proto.errors import InvalidSpec

SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable since NCCL 2.30; "1" lets several ranks share a GPU."""
_HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """Index of a worker among those of its launcher."""

    rank: int = 0
    world_size: int = 1

    def gpu(self, num_visible: int) -> int | None:
        """Return the index of this worker's GPU; None if there are too few. A single visible GPU is
        this worker's."""
        if num_visible == 1:
            return 0
        return self.rank if num_visible >= max(self.world_size, self.rank + 1) else None

    def check(
        self, index: int, num_visible: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Raise InvalidSpec if the model's GPU, at `index`, is not this worker's GPU.

        Raises also if the host has too few GPUs. Several workers may use one visible GPU if a
        variable hides others, or if NCCL is configured to share it.
        """
        own = self.gpu(num_visible)
        is_hidden = any(environment.get(name) for name in _HIDES_GPUS)
        is_shared = num_visible == 1 < self.world_size and not is_hidden
        if own is None or (is_shared and not shares_gpu(environment)):
            gpus = "1 GPU" if num_visible == 1 else f"{num_visible} GPUs"
            workers = "1 worker" if num_visible == 1 else f"{num_visible} workers"
            raise InvalidSpec(
                "this host has too few GPUs for its workers",
                seen=f"{self.world_size} workers, {gpus}",
                expected="a GPU for each worker whose model is on CUDA",
                fix=f"Start {workers} on this host: shoal run -n {num_visible} ..."
                f" Or export {SHARES_GPU}=1, with NCCL 2.30 or newer: then workers may share the"
                " only GPU of a host, to try something out.",
            )
        if index != own and self.world_size > 1:
            raise InvalidSpec(
                "the model is on the GPU of another worker of this host",
                seen=f"cuda:{index}, in worker {self.rank} of {self.world_size}",
                expected=f"cuda:{own}",
                fix='Call model.to("cuda") within `with shoal.join()`: there "cuda" is this'
                " worker's GPU. Before that, $SHOAL_LOCAL_RANK is its index.",
            )


def shares_gpu(environment: Mapping[str, str]) -> bool:
    """True if NCCL may let several ranks share a GPU."""
    return environment.get(SHARES_GPU, "") == "1"


def check_unshared(gpus: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Raise InvalidSpec if two ranks share a GPU and NCCL is not configured for that. `gpus`: GPU
    ids by rank."""
    by_gpu: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        by_gpu.setdefault(gpu, []).append(rank)
    shared = next((ranks for ranks in by_gpu.values() if len(ranks) > 1), None)
    if shared is not None and not shares_gpu(environment):
        raise InvalidSpec(
            "several members train on one GPU",
            seen=f"ranks {', '.join(map(str, shared))} on GPU {gpus[shared[0]]}",
            expected="a GPU for each member",
            fix="Start one worker for each GPU of a host: shoal run -n N ..., or give each worker"
            f" its own CUDA_VISIBLE_DEVICES. Or export {SHARES_GPU}=1, with NCCL 2.30 or newer.",
        )


@contextmanager
def own_gpu_used(local_rank: LocalRank) -> Iterator[None]:
    """Return a context in which "cuda" means this worker's GPU, if the host has a GPU for each of
    several workers.

    The setting remains after the block, but is undone after an error.
    """
    if not torch.cuda.is_available() or (num_visible := torch.cuda.device_count()) < 2:
        yield
        return
    before, own = torch.cuda.current_device(), local_rank.gpu(num_visible)
    if own is not None and local_rank.world_size > 1:
        torch.cuda.set_device(own)
    try:
        yield
    except BaseException:
        torch.cuda.set_device(before)
        raise


def check_gpu(local_rank: LocalRank, device: torch.device) -> None:
    """Check a model's device, and make it the current device, as NCCL needs."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    local_rank.check(index, torch.cuda.device_count())
    torch.cuda.set_device(index)
