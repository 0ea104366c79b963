"""Private names of torch, one module for each part of torch.

All names exist in torch 2.13 and 2.15. Names that 2.9 and 2.11 lack are replaced here; 2.10,
2.12 and 2.14 were not tried. To raise these versions, begin here, with `make test TORCH=2.15.0`; to
lower the oldest one, with `make test TORCH=2.9.1`.
`shoal_server` does not import the worker: its modules that call the fused kernels of `torch.optim`
name these kernels themselves.
"""

import torch

from shoal.torch_private.floor import check_version

check_version(torch.__version__)
