"""Every name of torch that is torch's own, by the part of torch that has it.

All of them were seen in torch 2.13; whoever raises that version begins here. `shoal_server` keeps
the fused kernels of `torch.optim` that it calls where it calls them: it does not import the worker.
"""
