"""Transports of a group's tensors on the host, as torch's table of groups names them."""

import functools

import torch.distributed as dist

from shoal.backends.process_group.collectives import CollectiveGroup

PLUGIN = "shoal_gloo"
"""Gloo's groups of a session's generation."""


def is_gloo(group: dist.ProcessGroup) -> bool:
    """True if torch's Gloo carries the group's tensors on the host, under whichever name."""
    return _host_transport(group) in ("gloo", PLUGIN)


def can_be_cut(group: dist.ProcessGroup) -> bool:
    """True if the group's tensors on the host go over a Gloo group of a session's generation. Those
    on a GPU may go over NCCL."""
    return _host_transport(group) == PLUGIN


def _host_transport(group: dist.ProcessGroup) -> str:
    # A group in Python is not always known to torch.
    if isinstance(group, CollectiveGroup):
        return ""
    return _transports(dist.get_backend_config(group)).get("cpu", "")


@functools.cache
def _transports(config: str) -> dict[str, str]:
    """Transports by kind of device, from a configuration such as "cpu:gloo,cuda:nccl"."""
    pairs = (each.partition(":") for each in config.split(","))
    return {device: transport for device, _, transport in pairs}
