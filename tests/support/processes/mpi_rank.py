"""A rank under mpiexec: `python mpi_rank.py DIRECTORY TIMEOUT_S MODULE.FUNCTION`.

The result or the error of the function is left in the directory under the rank's number.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

import shoal


def main() -> None:
    directory, timeout_s, name = sys.argv[1:]
    torch.set_num_threads(1)
    shoal.init_mpi(timeout_s=float(timeout_s))
    report = Path(directory, str(dist.get_rank()))
    module, _, function = name.rpartition(".")
    try:
        value = getattr(import_module(module), function)()
    except BaseException as error:
        report.write_text(json.dumps({"raised": type(error).__name__, "text": str(error)}))
        raise
    report.write_text(json.dumps({"returned": value}))
    dist.destroy_process_group()


main()
