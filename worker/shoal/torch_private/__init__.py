"""Every name of torch that is torch's own, by the part of torch that has it.

All of them were seen in torch 2.13 and 2.15; whoever raises these versions begins here, and with
`make test TORCH=2.15.0`. 2.12 has `fully_shard` without what the layouts need of it.
`shoal_server` keeps the fused kernels of `torch.optim` that it calls where it calls them: it does
not import the worker.
"""

import torch

from shoal.torch_private.floor import check_version

check_version(torch.__version__)
