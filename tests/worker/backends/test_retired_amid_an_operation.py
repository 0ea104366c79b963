"""A group retired during an operation that never ends: its process does not wait."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import ctypes
    import threading
    import time
    from datetime import timedelta

    import torch
    from shoal.backends.network import retired
    from shoal.torch_private.c10d import HashStore, ProcessGroupGloo

    store, groups = HashStore(), {}

    def connect(rank):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(hours=1)
        groups[rank] = ProcessGroupGloo(store, rank, 2, options)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The other rank stays connected, and never takes part in the sum.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups[1]))
    groups[0].allreduce([torch.ones(4)])
    began_s = time.monotonic()
    retired.retire([groups.pop(0)])
    print("retired", time.monotonic() - began_s < 5, retired.free_now(0.2))
"""


@pytest.mark.long
def test_neither_the_trainer_nor_its_process_waits_for_an_endless_operation() -> None:
    """Runs in an interpreter that ends in the ordinary way: members forked by tests exit without
    freeing anything."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "retired True False" in ended.stdout.splitlines(), ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert "groups_not_freed" in ended.stdout + ended.stderr
