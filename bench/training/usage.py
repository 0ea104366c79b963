"""Resources of processes, read from /proc."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources of one process."""

    memory_kib: int
    """Anonymous resident memory; pages of files are loaded and dropped at any time."""
    threads: int
    files: int


def usage_of(pid: int) -> Usage:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Usage(
        memory_kib=int(fields["RssAnon"].split()[0]),
        threads=int(fields["Threads"]),
        files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
    )


def shared_memory() -> tuple[int, int]:
    """Return the number of files in /dev/shm, and their bytes."""
    files = [path for path in Path("/dev/shm").rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)


def growth_per_kill(
    samples: Sequence[Mapping[str, Usage]], kills_between: int
) -> dict[str, dict[str, float]]:
    """Return the growth of each process per kill, without the first tenth of the samples."""
    begin = len(samples) // 10
    num_kills = (len(samples) - 1 - begin) * kills_between
    if num_kills <= 0:
        return {}
    first, last = samples[begin], samples[-1]
    return {
        name: {
            key: (value - asdict(first[name])[key]) / num_kills
            for key, value in asdict(last[name]).items()
        }
        for name in last
        if name in first
    }
