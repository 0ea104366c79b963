"""Measures the phases of a parameter server that a benchmark starts; no effect elsewhere."""

import atexit
import os
import sys

if "SHOAL_BENCH_PHASES" in os.environ and "ps" in sys.orig_argv:
    from exchange.phases import of_server, write_at_exit

    write_at_exit(of_server(), atexit.register)
