"""Every name of torch that is torch's own, by the part of torch that has it.

All of them were seen in torch 2.13 and 2.15. What 2.9 and 2.11 lack of them is made up for here;
2.10, 2.12 and 2.14 lie between and were not tried. Whoever raises these versions begins here, with
`make test TORCH=2.15.0`, and whoever lowers the oldest with `make test TORCH=2.9.1`.
`shoal_server` keeps the fused kernels of `torch.optim` that it calls where it calls them: it does
not import the worker.
"""

import torch

from shoal.torch_private.floor import check_version

check_version(torch.__version__)
