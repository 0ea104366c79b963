"""Makes a folder with which a GPU machine without a network can run `make gpu-test`.

    make gpu-bundle                                 # into .gpu, for Python 3.12 on x86_64
    make gpu-bundle PYTHON_VERSION=3.11 BUNDLE="--with grpcio"
    python3 .gpu/run.py --only K1,L                 # on the machine

The folder contains wheels of the versions in constraints.txt, checked by hash, Shoal's own wheel,
the cases of tests/gpu, and run.py, which checks the machine, unpacks the folder and runs the cases.
Large packages that such machines have, such as torch, are not in it: run.py reports if such a
package is missing or too old. A file libnccl.so.2.xz in the folder (deploy/small_nccl.py makes it)
is kept, and used if torch's own NCCL does not let several ranks share a GPU.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lock import ROOT, compile_lock
from requirements import requirements_of

EXTRA = "server"
"""Extra of pyproject.toml to bundle. It includes a worker's requirements."""
FOR_GPUS = ("torch",)
"""Packages that every GPU machine has, together with their requirements."""
LARGE = ("grpcio", "numpy", "safetensors")
"""Packages that GPU machines usually have: left out unless `--with` names them."""
CHECKED = ("torch", "numpy", "grpcio", "safetensors", "protobuf", "fsspec", "httpx", "rich")
MOST_BYTES = 45 * 2**20
NCCL = "libnccl.so.2.xz"
OWN = (NCCL, "wheels.tar.xz", "cases.tar.xz", "run.py", "bundle.json")
"""Names of all files in such a folder."""
CASES = ("gpu", "support")
"""Folders of tests/ that the cases need."""


class NotBundled(RuntimeError):
    """The folder could not be made, or is too large."""


def name_of(requirement: str) -> str:
    """Package of a requirement, in the normal form of package indexes."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement)[0]).lower()


def wanted() -> list[str]:
    """Requirements to bundle or to find on the machine, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in requirements_of(project, EXTRA) if name_of(each) not in FOR_GPUS]


def ranges() -> dict[str, str]:
    """Version ranges of the packages that are checked, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    for each in requirements_of(project, EXTRA):
        matched = re.match(r"[\w.-]+(?:\[[^\]]*\])?\s*([^;]*)", each)
        assert matched is not None, each
        if name_of(each) in CHECKED:
            found[name_of(each)] = matched[1].strip()
    return found


def entries(lock: str) -> dict[str, str]:
    """The lines of a lock by package."""
    found: dict[str, str] = {}
    for part in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()):
        found[name_of(part)] = part
    return found


def fetch(lock: Mapping[str, str], out: Path, python: str, machine: str) -> None:
    """Download the wheels of a lock. Raises NotBundled."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lock.values()) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:"]
        command += ["--python-version", python, "--dest", str(out), "--requirement", file.name]
        for glibc in ("2_34", "2_28", "2_17"):
            command += ["--platform", f"manylinux_{glibc}_{machine}"]
        command += ["--platform", f"manylinux2014_{machine}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBundled(f"a wheel cannot be downloaded:\n{done.stderr.strip()}")


def build_wheel(out: Path) -> None:
    """Build Shoal's own wheel. Raises NotBundled."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out.resolve())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBundled(f"Shoal's wheel was not built:\n{done.stdout}{done.stderr}")


def pack_wheels(folder: Path, out: Path) -> None:
    """Pack all wheels into one file. Compressed together, they take a third less space.

    Their hashes must be checked before: the packed wheels have other hashes.
    """
    with tarfile.open(out, "w:xz") as archive, tempfile.TemporaryDirectory() as plain:
        for wheel in sorted(folder.glob("*.whl")):
            unpacked = Path(plain) / wheel.name
            with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(unpacked, "w") as target:
                for info in source.infolist():
                    content = source.read(info)
                    info.compress_type = zipfile.ZIP_STORED
                    target.writestr(info, content)
            archive.add(unpacked, wheel.name)


def pack_cases(out: Path) -> None:
    """Pack the cases, and the test support that they use."""
    with tarfile.open(out, "w:xz") as archive:
        for folder in CASES:
            for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
                archive.add(path, path.relative_to(ROOT / "tests"))


def check_out(out: Path) -> None:
    """Raise NotBundled if the folder has other files than a bundle's, which would be removed."""
    others = sorted({each.name for each in out.iterdir()} - {*OWN})
    if others:
        raise NotBundled(
            f"{out} has {others[0]}, which is not part of a bundle. All files in that folder would"
            " be removed: give --out a new or an empty folder"
        )


def digests(out: Path) -> dict[str, str]:
    """The SHA-256 of each packed file, so that an incomplete copy is noticed."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.glob("*.tar.xz"))
    }


def bundle(out: Path, *, python: str, machine: str, further: Sequence[str], uv: Path) -> int:
    """Make the folder; return its size in bytes. An earlier bundle in it is replaced. Raises
    NotBundled; the earlier bundle stays then, unless the new one is too large."""
    unknown = sorted(set(further) - set(LARGE))
    if unknown:
        raise NotBundled(f"bad --with {unknown[0]}: expected one of {', '.join(LARGE)}")
    if out.exists() and not out.is_dir():
        raise NotBundled(f"{out} is not a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotBundled(f"{out} cannot be made: {error}") from error
    check_out(out)
    lock = entries(compile_lock(wanted(), machine, python=python, uv=uv))
    left_out = {name: lock.pop(name) for name in LARGE if name in lock and name not in further}
    with tempfile.TemporaryDirectory() as wheels:
        fetch(lock, Path(wheels), python, machine)
        build_wheel(Path(wheels))
        for old in out.iterdir():
            if old.name != NCCL:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        pack_wheels(Path(wheels), out / "wheels.tar.xz")
    pack_cases(out / "cases.tar.xz")
    shutil.copy(Path(__file__).with_name("gpu_run.py"), out / "run.py")
    contents = {
        "python": python,
        "machine": machine,
        "ranges": ranges(),
        "carried": sorted(lock),
        "left_out": sorted([*left_out, *FOR_GPUS]),
        "files": digests(out),
    }
    (out / "bundle.json").write_text(json.dumps(contents, indent=2) + "\n")
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MOST_BYTES:
        parts = sorted(((p.stat().st_size, p.name) for p in out.iterdir()), reverse=True)
        largest = ", ".join(f"{name} {num / 2**20:.1f} MiB" for num, name in parts)
        raise NotBundled(
            f"{out} has {size / 2**20:.1f} MiB, more than {MOST_BYTES / 2**20:g};"
            f" the largest: {largest}"
        )
    return size


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path(".gpu"), metavar="DIRECTORY")
    parser.add_argument("--python-version", default="3.12", metavar="X.Y")
    parser.add_argument("--machine", default="x86_64", choices=["x86_64", "aarch64"])
    parser.add_argument("--with", dest="further", action="append", default=[], metavar="NAME")
    parser.add_argument("--uv", type=Path, required=True, help="a Python that has uv")
    given = parser.parse_args(arguments)
    try:
        size = bundle(
            given.out,
            python=given.python_version,
            machine=given.machine,
            further=given.further,
            uv=given.uv,
        )
    except NotBundled as error:
        print(error, file=sys.stderr)
        return 1
    nccl = "with" if (given.out / NCCL).exists() else "without"
    print(f"{given.out}: {size / 2**20:.1f} MiB, {nccl} an NCCL of its own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
