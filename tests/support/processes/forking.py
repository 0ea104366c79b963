"""Where tests fork their processes from: a server that has imported already what takes long.

A process has one such server, whichever module asks for it, and what is set last is preloaded: so
the list stands here once, for ranks and for servers. Modules of the tests cannot be in it, as they
are not on the server's path.
"""

import multiprocessing

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        "shoal.session.session",
        "shoal.strategies.asynchronous.async_diloco",
        "shoal.strategies.asynchronous.async_sgd",
        "shoal.strategies.synchronous.ddp",
        "shoal.strategies.layout.fsdp",
        "shoal.strategies.layout.hybrid",
        "shoal.strategies.local_sgd.strategy",
        "shoal.strategies.layout.zero1",
        "shoal_server.parameters.process",
        # What torch imports only when a first optimizer is made.
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
    ]
)

__all__ = ["forked"]
