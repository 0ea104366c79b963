"""Campaigns: a cluster that is up within a block, the cases that run on it, and their table."""

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

END_S = 20.0

Found = TypeVar("Found")


class NotPossible(Exception):
    """The reason why this machine cannot have such a cluster."""


class LeftOut(Exception):
    """The reason why a case does not apply to this cluster."""


class Cluster(Protocol):
    """Processes, and what they need on this machine."""

    def start(self) -> None: ...

    def close(self) -> None:
        """End all processes of the cluster, and remove what it has made, also after a start that
        failed."""


C = TypeVar("C", bound=Cluster)


@contextmanager
def running(cluster: C) -> Iterator[C]:
    """Keep the cluster up within the block."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


class Case(Protocol):
    """A job in a cluster, as a check uses it."""

    facts: dict[str, object]
    """The row of a case in the table."""

    @property
    def folder(self) -> Path:
        """Files of the job."""

    def clean_up(self) -> None:
        """Show what helps to find the fault, and end the job, after a check that failed."""


K = TypeVar("K", bound=Case)


def run_campaign(
    parser: argparse.ArgumentParser,
    checks: Sequence[Callable[[K], None]],
    arguments: Sequence[str],
    begin: Callable[[argparse.Namespace], AbstractContextManager[Callable[[str], K]]],
) -> int:
    """Run the checks, each on the case of its name, and print their table. `begin` brings up the
    cluster, and gives the cases within its block. Return 1 if a check has failed, 2 if this machine
    cannot have the cluster."""
    names = [check.__name__ for check in checks]
    parser.add_argument("--only", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--keep", type=Path, help="a folder for the files of the jobs")
    options = parser.parse_args(arguments)
    # SIGTERM removes the cluster, like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; expected {', '.join(names)}")
    rows: list[tuple[str, str, float, str]] = []
    try:
        with begin(options) as case_of:
            for check in (each for each in checks if each.__name__ in wanted):
                rows.append(_row(case_of(check.__name__), check, options.keep))
                print("  ".join(map(str, rows[-1])), flush=True)
    except NotPossible as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print("\n| case | | seconds | |\n|---|---|---|---|")
    for name, result, seconds, facts in rows:
        print(f"| {name} | {result} | {seconds:.0f} | {facts} |")
    return int(any(result == "FAILED" for _, result, *_ in rows))


def _row(case: K, check: Callable[[K], None], keep: Path | None) -> tuple[str, str, float, str]:
    began_s = time.monotonic()
    try:
        check(case)
        result = "passed"
    except LeftOut as reason:
        result, case.facts["left out"] = "left out", reason
    except Exception:  # noqa: BLE001  # the other cases are run all the same
        traceback.print_exc()
        case.clean_up()
        result = "FAILED"
    if keep is not None and case.folder.exists():
        shutil.copytree(case.folder, keep / check.__name__, dirs_exist_ok=True)
    facts = ", ".join(f"{name}: {value}" for name, value in case.facts.items())
    return check.__name__, result, time.monotonic() - began_s, facts


def awaited(
    look: Callable[[], Found | None], within_s: float, what: str, every_s: float = 0.1
) -> Found:
    """Return the first true result of `look`. Raises AssertionError if there is none in time."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return found


def require_programs(programs: Collection[str], why_root: str, packages: str) -> None:
    """Raise NotPossible unless this process is root, and the programs are there. `packages`: those
    of Debian that have them."""
    if os.geteuid() != 0:
        raise NotPossible(f"{why_root} need root")
    if missing := [each for each in programs if shutil.which(each) is None]:
        raise NotPossible(f"{', '.join(missing)}: not there; Debian: apt-get install {packages}")


def command_lines(pids: Collection[int]) -> dict[int, str]:
    """The command lines of those of these processes that run."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            if line:
                found[pid] = line.decode(errors="replace")
    return found


def kill_all(pids_of: Callable[[], Collection[int]], where: str) -> None:
    """Kill these processes until none is left: they may start others meanwhile."""

    def ended() -> bool:
        pids = pids_of()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    awaited(ended, END_S, f"the end of all processes {where}", every_s=0.05)
