"""Fork server of the tests, which has already imported the modules that take long to import.

A process has one such server, shared by all modules, and the last preload list wins. So the only
list is here, for ranks and for servers. Modules of the tests cannot be in it, as they are not on
the server's path.
"""

import multiprocessing

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        "shoal.session.session",
        "shoal.strategies.asynchronous.async_diloco",
        "shoal.strategies.asynchronous.async_sgd",
        "shoal.strategies.layout.ddp",
        "shoal.strategies.layout.fsdp",
        "shoal.strategies.layout.hybrid",
        "shoal.strategies.local_sgd.strategy",
        "shoal.strategies.layout.zero1",
        "shoal_server.parameters.process",
        # Modules that torch imports only when the first optimizer is built.
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
    ]
)

__all__ = ["forked"]
