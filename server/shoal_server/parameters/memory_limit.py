"""The default memory limit of a server: from its cgroup, else from the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.8
"""Fraction of the memory that is the limit. The rest is for the interpreter, and for messages and
chunks of images in transit."""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def default_limit_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return 80 % of the lowest memory limit that applies to this process: the machine's memory, or
    a limit of the process's cgroup (version 1 or 2) or of one of its ancestors.

    `cgroups`: the folder where cgroups are mounted. `own`: a file with the content of
    /proc/self/cgroup.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(SHARE * min([machine_bytes, *_limits(cgroups, own)]))


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    for folder, file in _folders(cgroups, own):
        try:
            text = (folder / file).read_text().strip()
        except OSError:
            # The root cgroup has no such file; in a container, the path may be the host's.
            continue
        if text.isdigit():
            yield int(text)


def _folders(cgroups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder and the file name of each limit that may be set for this process."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        if not controllers:
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in (inner, *inner.parents):
            yield root / folder, file
