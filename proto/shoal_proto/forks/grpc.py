"""gRPC in a process that is forked, as a trainer is by a DataLoader that starts its workers.

gRPC's core has handlers of its own for forks, which stop its threads and start them anew in the
child. With calls under way on other threads they fail: of 120 children up to 5 ended with SIGSEGV
or SIGABRT, or hung (grpcio 1.85.1). No child of ours uses the connections of its parent, and
without the handlers nothing of gRPC runs in it, unless Python's collector comes upon its objects.
"""

import gc
import os

_SWITCH = "GRPC_ENABLE_FORK_SUPPORT"


def prepare() -> None:
    """Let children have nothing to do with gRPC. To be called before gRPC is imported, which reads
    the environment once; what the environment says already holds."""
    if os.environ.setdefault(_SWITCH, "0") == "0":
        os.register_at_fork(after_in_child=gc.freeze)
