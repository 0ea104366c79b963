"""Run the cases of `make gpu-test` from this folder, on a machine without a network.

    python3 .gpu/run.py                    # looks at the machine, unpacks, runs all cases
    python3 .gpu/run.py --only K1,L        # what is not for this script goes to the cases
    python3 .gpu/run.py --check            # looks only

It needs nothing but Python and pip, and writes below `--into` alone.
"""

# An older Python is to come as far as saying what is wrong with it.
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
"""A file in each folder that this script has unpacked to."""
SHARES_A_GPU = (2, 30)
"""The first NCCL that lets several ranks use one GPU."""
AGAIN = "copy the folder once more"
ANSWERS_S = 20.0
"""The longest wait for nvidia-smi, which a driver in trouble holds up for ever."""


class NotRun(RuntimeError):
    """The cases cannot be run, for this reason."""


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers, without what stands behind them: 2.11.0+cu130 is 2, 11, 0."""
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
    """What the folder says of itself. Raises NotRun."""
    path = HERE / "bundle.json"
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotRun(f"{path.name} of {HERE} cannot be read ({error}): {AGAIN}") from error
    assert isinstance(contents, dict)
    return contents


def damages(digests: Mapping[str, str]) -> list[str]:
    """Files of the folder that are not as they were made, a line each."""
    found = []
    for name, digest in digests.items():
        path = HERE / name
        if not path.exists():
            found.append(f"{name} is missing in {HERE}: {AGAIN}")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            found.append(f"{name} has not come whole ({path.stat().st_size} bytes): {AGAIN}")
    return found


def look(contents: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Versions that are there, and faults that keep the cases from running, a line each."""
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
    """Unpack it, without what a file cannot be; Python before 3.11.4 has no such filter."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(into, filter="data")
    else:
        archive.extractall(into)


def check_into(into: Path, *, preloads: bool = False) -> None:
    """Raise NotRun for a folder with files of others: all that is in it is removed; and for a path
    that is none in a list of them. `preloads`: a library there is preloaded."""
    if into.is_dir() and any(into.iterdir()) and not (into / MADE_HERE).exists():
        raise NotRun(
            f"{into} has files that this script did not write, and what is in that folder is"
            " removed first: give --into a new or an empty one"
        )
    if into.exists() and not into.is_dir():
        raise NotRun(f"{into} is no folder: give --into a new or an empty one")
    # What stands between the paths of PYTHONPATH; in LD_PRELOAD a space does as well.
    separators = (os.pathsep, " ") if preloads else (os.pathsep,)
    ends = [each for each in separators if each in str(into)]
    if ends:
        raise NotRun(
            f"{into} has a {ends[0]!r} in it, which ends a path of PYTHONPATH or LD_PRELOAD: give"
            " --into another one"
        )


def unpack(into: Path) -> None:
    """Unpack the wheels' packages to `site` and the cases to `cases`.

    What an image or a user has set for pip (a constraint, --user) is for other installations.
    Raises NotRun.
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
        raise NotRun(f"pip has not installed the wheels:\n{done.stderr.strip()}")


def nccl_of_torch() -> tuple[int, ...] | None:
    """The NCCL that torch comes with; empty: none. None: no GPU that torch can use."""
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
    return f"no GPU that torch can use{shown}: see nvidia-smi; --device cpu tries the cases without"


def own_nccl(into: Path) -> Path:
    """The folder's NCCL, unpacked; it answers to being asked for its version. Raises NotRun."""
    target = into / NCCL
    number = ctypes.c_int()
    try:
        with lzma.open(HERE / f"{NCCL}.xz") as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)
        has_version = ctypes.CDLL(str(target)).ncclGetVersion(ctypes.byref(number)) == 0
    except (OSError, EOFError, lzma.LZMAError, AttributeError) as error:
        raise NotRun(f"{NCCL}.xz of {HERE} is no NCCL ({error}): make it once more") from error
    if not has_version:
        raise NotRun(f"{NCCL}.xz of {HERE} does not tell its version")
    print(f"NCCL {number.value} of this folder is used", flush=True)
    return target


def _before(variables: Mapping[str, str], name: str, *paths: str) -> str:
    """The list of paths that a variable has, with these before it: torch may be found by it."""
    return os.pathsep.join(filter(None, [*paths, variables.get(name, "")]))


def is_too_old(nccl: tuple[int, ...]) -> bool:
    """True if this NCCL lets no ranks share a GPU."""
    return bool(nccl) and nccl < SHARES_A_GPU


def environment(into: Path, present: tuple[int, ...] | None) -> dict[str, str]:
    """The environment of the cases. NCCL is this folder's if torch's (`present`; None: there is no
    GPU) lets no ranks share one. Raises NotRun."""
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
    parser.add_argument("--check", action="store_true", help="look at the machine, and no more")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given, further = parser.parse_known_args(arguments)
    try:
        return run(given, further)
    except NotRun as refused:
        print(refused)
        return 1


def run(given: argparse.Namespace, further: Sequence[str]) -> int:
    """Look, and unpack and run unless that is all; the exit code. Raises NotRun."""
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
        raise NotRun(f"nothing could be unpacked into {into}: {error}") from error
    command = [sys.executable, "-m", "gpu.campaign", "--device", given.device, *further]
    return subprocess.run(command, env=own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
