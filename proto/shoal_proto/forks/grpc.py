"""gRPC in a process that forks, as a trainer does for a DataLoader.

gRPC's own fork handlers fail while calls are in progress on other threads: of 120 children up to 5
crashed or hung (grpcio 1.85.1). No child process of Shoal uses its parent's connections. Without
the handlers, no code of gRPC runs in a child unless Python's garbage collector visits gRPC's
objects.
"""

import gc
import os

_SWITCH = "GRPC_ENABLE_FORK_SUPPORT"


def prepare() -> None:
    """Disable gRPC's fork handlers, unless the environment has a setting, and exempt its objects
    from garbage collection in children. Call it before gRPC is imported."""
    if os.environ.setdefault(_SWITCH, "0") == "0":
        os.register_at_fork(after_in_child=gc.freeze)
