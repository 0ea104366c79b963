"""Run the cases of `make gpu-test` from this folder, on a machine without a network.

    python3 .gpu/run.py                    # checks the machine, unpacks, runs all cases
    python3 .gpu/run.py --only K1,L        # other options are passed to the cases
    python3 .gpu/run.py --check            # only checks the machine

It needs only Python and pip, and writes only below `--into`.
"""

# With this import, an older Python reaches the message that it is too old.
from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
NCCL = "libnccl.so.2"
MADE_HERE = ".gpu-bundle"
"""Name of the file that marks a folder as made by this script."""
SHARES_A_GPU = (2, 30)
"""The first NCCL that lets several ranks use one GPU."""
AGAIN = "copy the folder once more"
ANSWERS_S = 20.0
"""Time limit for nvidia-smi, which never returns if the driver hangs."""


class NotRun(RuntimeError):
    """The cases cannot be run; the message gives the reason."""


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of a version, without a suffix: 2, 11, 0 for 2.11.0+cu130."""
    matched = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()


def fits(seen: str, wanted: str) -> bool:
    """True if a version is within a range such as ">=6.31,<8"."""
    for part in filter(None, (each.strip() for each in wanted.split(","))):
        matched = re.fullmatch(r"(>=|<)\s*([\d.]+)", part)
        assert matched is not None, part
        is_least, bound = matched[1] == ">=", numbers(matched[2])
        if (numbers(seen)[: len(bound)] >= bound) is not is_least:
            return False
    return True


def seen_version(name: str) -> str:
    """The installed version; empty: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def description() -> dict[str, object]:
    """Contents of the folder's bundle.json. Raises NotRun."""
    path = HERE / "bundle.json"
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotRun(f"{path.name} of {HERE} cannot be read ({error}): {AGAIN}") from error
    assert isinstance(contents, dict)
    return contents


def damages(digests: Mapping[str, str]) -> list[str]:
    """Missing and incomplete files of the folder, one line each."""
    found = []
    for name, digest in digests.items():
        path = HERE / name
        if not path.exists():
            found.append(f"{name} is missing in {HERE}: {AGAIN}")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            found.append(f"{name} is incomplete ({path.stat().st_size} bytes): {AGAIN}")
    return found


def look(contents: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Installed versions, and faults that keep the cases from running, one line each."""
    files = contents["files"]
    assert isinstance(files, dict)
    seen, wrong = [], damages(files)
    python = platform.python_version()
    seen.append(f"python {python} on {platform.machine()}")
    if ".".join(python.split(".")[:2]) != contents["python"]:
        wrong.append(
            f"this is Python {python}, and the wheels are for {contents['python']}:"
            f" make gpu-bundle PYTHON_VERSION={'.'.join(python.split('.')[:2])}"
        )
    if platform.machine() != contents["machine"]:
        wrong.append(
            f"this is {platform.machine()}, and the wheels are for {contents['machine']}:"
            f' make gpu-bundle BUNDLE="--machine {platform.machine()}"'
        )
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            found = subprocess.run(
                asked, capture_output=True, text=True, timeout=ANSWERS_S, check=False
            )
            seen.append(f"GPU and driver: {found.stdout.strip() or found.stderr.strip()}")
        except subprocess.TimeoutExpired:
            wrong.append(f"nvidia-smi does not answer within {ANSWERS_S:g} s: see the driver's log")
    else:
        seen.append("GPU and driver: none found, as there is no nvidia-smi")
    ranges, carried = contents["ranges"], contents["carried"]
    assert isinstance(ranges, dict) and isinstance(carried, list)
    for name, wanted in ranges.items():
        own = seen_version(name)
        if name in carried:
            seen.append(f"{name} {own or 'missing'} here; the folder's is used")
            continue
        seen.append(f"{name} {own or 'missing'}")
        if not own or not fits(own, wanted):
            fix = "" if name == "torch" else f': make gpu-bundle BUNDLE="--with {name}"'
            wrong.append(f"{name} is {own or 'missing'}, and Shoal needs {name}{wanted}{fix}")
    if not seen_version("pip"):
        wrong.append(f"no pip: {sys.executable} -m ensurepip")
    return seen, wrong


def extract(archive: tarfile.TarFile, into: Path) -> None:
    """Unpack an archive, without unsafe entries if Python can filter them (from 3.11.4 on)."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(into, filter="data")
    else:
        archive.extractall(into)


def check_into(into: Path, *, preloads: bool = False) -> None:
    """Raise NotRun if the folder has files that this script did not write: all files in it will be
    removed. Raise it too if the folder's path cannot be part of PYTHONPATH or, with `preloads`, of
    LD_PRELOAD."""
    if into.is_dir() and any(into.iterdir()) and not (into / MADE_HERE).exists():
        raise NotRun(
            f"{into} has files that this script did not write, and everything in that folder would"
            " be removed: give --into a new or an empty one"
        )
    if into.exists() and not into.is_dir():
        raise NotRun(f"{into} is not a folder: give --into a new or an empty one")
    # Separators of paths in PYTHONPATH; in LD_PRELOAD a space separates them too.
    separators = (os.pathsep, " ") if preloads else (os.pathsep,)
    ends = [each for each in separators if each in str(into)]
    if ends:
        raise NotRun(
            f"{into} has a {ends[0]!r} in it, which ends a path of PYTHONPATH or LD_PRELOAD: give"
            " --into another one"
        )


def unpack(into: Path) -> None:
    """Unpack the wheels' packages to `site` and the cases to `cases`.

    pip's settings of the image and the user (a constraint, --user) are ignored. Raises NotRun.
    """
    check_into(into)
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    (into / MADE_HERE).touch()
    for name in ("wheels", "cases"):
        with tarfile.open(HERE / f"{name}.tar.xz") as archive:
            extract(archive, into / name)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--target", str(into / "site"), *map(str, (into / "wheels").iterdir())]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    own["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRun(f"pip did not install the wheels:\n{done.stderr.strip()}")


def nccl_of_torch() -> tuple[int, ...] | None:
    """Version of torch's NCCL; empty if it has none. None: torch can use no GPU."""
    code = (
        "import torch; print(*torch.cuda.nccl.version()) if torch.cuda.is_available() else exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        return None
    return tuple(map(int, done.stdout.split())) if not done.returncode else ()


def without_gpu() -> str:
    """The line for a machine on which torch sees no GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES is {hidden!r}"
    return f"no GPU that torch can use{shown}: see nvidia-smi, or run the cases with --device cpu"


def own_nccl(into: Path) -> Path:
    """Unpack the folder's NCCL, and check that it reports its version. Raises NotRun."""
    target = into / NCCL
    number = ctypes.c_int()
    try:
        with lzma.open(HERE / f"{NCCL}.xz") as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)
        has_version = ctypes.CDLL(str(target)).ncclGetVersion(ctypes.byref(number)) == 0
    except (OSError, EOFError, lzma.LZMAError, AttributeError) as error:
        raise NotRun(f"{NCCL}.xz of {HERE} is not NCCL ({error}): make it again") from error
    if not has_version:
        raise NotRun(f"{NCCL}.xz of {HERE} does not report its version")
    print(f"NCCL {number.value} of this folder is used", flush=True)
    return target


def _before(variables: Mapping[str, str], name: str, *paths: str) -> str:
    """Put paths before those in a variable, which may be needed to find torch."""
    return os.pathsep.join(filter(None, [*paths, variables.get(name, "")]))


def is_too_old(nccl: tuple[int, ...]) -> bool:
    """True if this NCCL does not let ranks share a GPU."""
    return bool(nccl) and nccl < SHARES_A_GPU


def environment(into: Path, present: tuple[int, ...] | None) -> dict[str, str]:
    """The environment of the cases. `present`: version of torch's NCCL; None: there is no GPU. If
    that NCCL does not let ranks share a GPU, the folder's NCCL is preloaded. Raises NotRun."""
    own = dict(os.environ)
    own["PYTHONPATH"] = _before(own, "PYTHONPATH", str(into / "site"), str(into / "cases"))
    own["PATH"] = _before(own, "PATH", str(into / "site" / "bin"))
    if present is None:
        return own
    print(f"NCCL {'.'.join(map(str, present)) or 'missing'} of torch", flush=True)
    if is_too_old(present):
        if (HERE / f"{NCCL}.xz").exists():
            own["LD_PRELOAD"] = _before(own, "LD_PRELOAD", str(own_nccl(into)))
        else:
            print(
                "several ranks on one GPU need NCCL 2.30: with fewer than 4 GPUs most cases fail."
                f" deploy/small_nccl.py makes {NCCL}.xz for this folder.",
                flush=True,
            )
    return own


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--into", type=Path, default=Path("build/gpu-bundle"), metavar="DIRECTORY")
    parser.add_argument("--check", action="store_true", help="only check the machine")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given, further = parser.parse_known_args(arguments)
    try:
        return run(given, further)
    except NotRun as refused:
        print(refused)
        return 1


def run(given: argparse.Namespace, further: Sequence[str]) -> int:
    """Check the machine; without --check unpack, and run. Returns the exit code. Raises NotRun."""
    seen, wrong = look(description())
    present = None
    if given.device == "cuda" and seen_version("torch"):
        present = nccl_of_torch()
        wrong += [without_gpu()] if present is None else []
    into = given.into.resolve()
    preloads = present is not None and is_too_old(present) and (HERE / f"{NCCL}.xz").exists()
    print(*seen, sep="\n", flush=True)
    if wrong:
        print("this machine cannot run the cases:", *(f"  {each}" for each in wrong), sep="\n")
        return 1
    if given.check:
        return 0
    check_into(into, preloads=preloads)
    try:
        unpack(into)
        own = environment(into, present)
    except OSError as error:
        raise NotRun(f"the folder could not be unpacked into {into}: {error}") from error
    command = [sys.executable, "-m", "gpu.campaign", "--device", given.device, *further]
    return subprocess.run(command, env=own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
