"""File descriptors that this process reserves for its own work, such as the connection to etcd."""

from shoal_proto.descriptor_limit import limit

RESERVED = 128


def descriptors_for_callers(share: float) -> int:
    """Number of descriptors for callers: this share of the unreserved ones, at least 1."""
    return max(1, int((limit() - RESERVED) * share))


def is_reserved(descriptor: int) -> bool:
    """True for a descriptor in the reserve. The system assigns the lowest free number, so the
    descriptors below the reserve are then all in use."""
    return descriptor >= limit() - RESERVED
