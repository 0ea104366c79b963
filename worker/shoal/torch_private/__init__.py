"""Private names of torch, one module for each part of torch.

All names exist in torch 2.13 and 2.15. Names that 2.9 and 2.11 lack are replaced here. To raise
these versions, begin here, with `make test TORCH=2.15.0`. `shoal_server` does not import the
worker: it names fused kernels of `torch.optim` itself.
"""

import re

import torch

from shoal_proto.errors import InvalidSpec

_OLDEST = (2, 9)


def check_version(version: str) -> None:
    """Raise InvalidSpec for a torch that is too old. An unreadable version passes."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise InvalidSpec(
            "this torch is too old for Shoal",
            seen=f"torch {version}",
            expected=f"torch {oldest} or newer",
            fix=f"pip install 'torch>={oldest}'",
        )


check_version(torch.__version__)
