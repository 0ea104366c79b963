"""How much memory a server may take where nobody says: by its cgroup, else by the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.8
"""Of what there is. The rest is for the interpreter, for messages on their way and for images of
shards that are being sent."""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def default_limit_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """80 % of the lowest memory limit of this process's cgroup and those around it, version 1 or
    2; where none is set, of the machine's memory.

    `cgroups` is where cgroups are mounted, `own` lists the process's own, as /proc/self/cgroup.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(SHARE * min([machine_bytes, *_limits(cgroups, own)]))


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    for folder, file in _folders(cgroups, own):
        try:
            text = (folder / file).read_text().strip()
        except OSError:
            # The root has no such file; within a container, the path may be that of the host.
            continue
        if text.isdigit():
            yield int(text)


def _folders(cgroups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Where the process's limits may stand: in its own cgroup, and in each one around it."""
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
