"""Predicates about a group's transport for tensors on the host."""

import functools

import torch.distributed as dist

from shoal.backends.process_group.collectives import CollectiveGroup

PLUGIN = "shoal_gloo"
"""torch's name of the backend for a session's Gloo groups."""


def is_gloo(group: dist.ProcessGroup) -> bool:
    """True if Gloo carries the group's tensors on the host, under either name."""
    return _host_transport(group) in ("gloo", PLUGIN)


def can_be_cut(group: dist.ProcessGroup) -> bool:
    """True if a session's Gloo group carries the group's tensors on the host. Tensors on a GPU may
    go over NCCL."""
    return _host_transport(group) == PLUGIN


def _host_transport(group: dist.ProcessGroup) -> str:
    # torch's table may lack a group that is written in Python.
    if isinstance(group, CollectiveGroup):
        return ""
    return _transports(dist.get_backend_config(group)).get("cpu", "")


@functools.cache
def _transports(config: str) -> dict[str, str]:
    pairs = (each.partition(":") for each in config.split(","))
    return {device: transport for device, _, transport in pairs}
