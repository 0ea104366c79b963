"""Releases as they were: their code, kept in the repository, and how a process runs it.

    .venv/bin/python tests/support/releases/recorded.py 0.1.0

keeps the code of now as that of release 0.1.0. What is kept is never changed afterwards.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent.parent / "releases"
ROOT = KEPT.parent.parent
PARTS = ("proto/shoal_proto", "client/shoal_client", "server/shoal_server", "worker/shoal")


def archive(version: str) -> Path:
    return KEPT / f"shoal-{version}.tar.xz"


def environment(version: str, unpacked_at: Path) -> dict[str, str]:
    """With which Python imports the release: a kept one, `next`, or `now`."""
    if version == "now":
        return {}
    if version == "next":
        path = HERE / "next_release"
    else:
        path = unpacked_at / version
        if not path.exists():
            with tarfile.open(archive(version)) as kept:
                kept.extractall(path, filter="data")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))}


def keep(version: str) -> Path:
    """Keep what git tracks of the packages as that release."""
    target = archive(version)
    if target.exists():
        raise SystemExit(f"{target} is kept already: a release does not change")
    listed = subprocess.run(
        ["git", "ls-files", *PARTS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with tarfile.open(target, "w:xz", preset=9) as kept:
        for name in listed.stdout.splitlines():
            kept.add(ROOT / name, arcname=name.partition("/")[2])
    return target


if __name__ == "__main__":
    print(keep(sys.argv[1]))
