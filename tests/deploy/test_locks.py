"""Packages that images install: locked by hash, in the versions that the tests ran with."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from deploy.scripts import lock
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
CUDA = re.compile("nvidia-|triton$|cuda-")
"""Further requirements of torch for GPUs: constraints.txt is for torch without CUDA."""
FREE = {"setuptools"}
"""Packages that come with an environment, and that constraints.txt does not fix."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str, machine: str = "x86_64") -> dict[str, tuple[str, list[str]]]:
    """Version and hashes by package."""
    found = {}
    text = lock.path_of(name, machine).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pinned = re.match(r"([\w.-]+)==(\S+)", line)
        assert pinned is not None, line
        found[normal(pinned[1])] = (pinned[2], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line))
    return found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


@pytest.mark.parametrize("machine", lock.MACHINES)
@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_agrees_with_the_constraints(name: str, machine: str) -> None:
    """The lock has the same versions, each with a hash. `make locks` writes the locks."""
    found, wanted = locked(name, machine), constraints()
    is_cuda = "torch" in found and not lock.is_without_cuda(name, machine)
    for package, (version, hashes) in found.items():
        assert hashes, f"{package} has no hash"
        if package in FREE or (is_cuda and CUDA.match(package)):
            continue
        assert version.removesuffix("+cpu") == wanted[package], f"{package}: run `make locks`"
    assert any(CUDA.match(package) for package in found) is is_cuda


@pytest.mark.parametrize("machine", lock.MACHINES)
@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_has_the_packages_of_its_extra(name: str, machine: str) -> None:
    extra, _ = lock.LOCKS[name]
    direct = {normal(re.split(r"[\s<>=!~;\[]", each)[0]) for each in lock.wanted(extra)}
    assert direct <= set(locked(name, machine)), "run `make locks`"


@pytest.mark.parametrize("machine", lock.MACHINES)
def test_a_coordinator_has_no_torch_and_a_worker_no_server(machine: str) -> None:
    assert not {"torch", "numpy"} & set(locked("coordinator", machine))
    assert not {"fastapi", "uvicorn"} & set(locked("worker", machine))


def test_torch_without_cuda_is_locked_if_there_is_such_a_build() -> None:
    assert locked("worker")["torch"][0].endswith("+cpu")
    assert "+" not in locked("worker", "aarch64")["torch"][0]


def test_no_lock_is_for_a_machine_or_an_image_that_nothing_names() -> None:
    names = [*lock.LOCKS, "build"]
    known = {lock.path_of(name, machine) for name in names for machine in lock.MACHINES}
    assert set((ROOT / "deploy" / "locks").iterdir()) == known


@pytest.mark.parametrize("machine", lock.MACHINES)
def test_build_tools_are_locked_too(machine: str) -> None:
    """The build's own tools are not part of an image."""
    found = locked("build", machine)
    assert {"hatchling", "cyclonedx-bom", "pip"} <= set(found)
    assert all(hashes for _, hashes in found.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"].startswith("hatchling")


def test_the_dockerfile_installs_nothing_without_a_hash() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "PIP_REQUIRE_HASHES=1" in text
    installs = [
        line for line in text.replace("\\\n", " ").splitlines() if "PIP_REQUIRE_HASHES=0" in line
    ]
    [only] = installs
    for command in only.split("&&"):
        if "PIP_REQUIRE_HASHES=0" in command:
            assert "--no-deps" in command and ("--no-index" in command or "wheel" in command)
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+\.\d+-", text, re.MULTILINE), "a release, not a line"


def test_the_oldest_python_can_install_every_constrained_version() -> None:
    """Debian 12 has 3.11.2: pip cannot install a version that requires a later one."""
    too_new = {}
    for name in constraints():
        try:
            asked = metadata(name).get("Requires-Python", "")
        except PackageNotFoundError:  # of an extra, or a system, that is not here
            continue
        if "3.11.2" not in SpecifierSet(asked):
            too_new[name] = asked
    assert too_new == {}
