"""A limit on the files that this process may open."""

import itertools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def few_files(num_further: int) -> Iterator[None]:
    """Have the soft limit allow this process so many further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Without the descriptor of the listing itself.
    used = {int(each.name) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (next(itertools.islice(free, num_further, None)), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
