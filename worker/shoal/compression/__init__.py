"""Compression of gradients for slow networks."""

from collections.abc import Mapping
from importlib import import_module

from shoal.compression.base import Compression
from shoal_proto.errors import InvalidSpec

# A module is imported when its compression is used.
COMPRESSIONS: Mapping[str, tuple[str, str]] = {
    "bf16": ("shoal.compression.half", "BF16"),
    "fp16": ("shoal.compression.half", "FP16"),
    "int8": ("shoal.compression.quantised", "Int8"),
    "one-bit": ("shoal.compression.quantised", "OneBit"),
    "powersgd": ("shoal.compression.low_rank", "PowerSGD"),
    "top-k": ("shoal.compression.sparse", "TopK"),
}


def find_compression(compression: str | Compression) -> Compression:
    """Return the compression of this name with its default options; an object is returned as is.
    Raises InvalidSpec for an unknown name."""
    if isinstance(compression, Compression):
        return compression
    if compression not in COMPRESSIONS:
        raise InvalidSpec(
            f"there is no compression {compression!r}",
            seen=repr(compression),
            expected=f"one of {', '.join(map(repr, COMPRESSIONS))}, or an object such as "
            "shoal.TopK(ratio=0.01)",
        )
    module, kind = COMPRESSIONS[compression]
    chosen: Compression = getattr(import_module(module), kind)()
    return chosen


__all__ = ["COMPRESSIONS", "find_compression"]
