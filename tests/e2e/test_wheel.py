"""The wheel as a user installs it: complete, and usable without the source tree."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0


def run(*command: str, cwd: Path, **environment: str) -> str:
    own = {
        key: value
        for key, value in os.environ.items()
        if key != "PYTHONPATH" and not key.startswith("SHOAL_")
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**own, **environment},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory), cwd=ROOT)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an empty environment with the wheel in it.

    Dependencies are those of the environment that runs the tests, so that nothing is downloaded:
    a .pth line makes their directory importable, but does not follow the .pth in there through
    which an editable install of Shoal would be found.
    """
    directory = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", str(directory), cwd=directory)
    python = directory / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=directory)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(str(python), "-c", purelib, cwd=directory).strip())
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory / "bin"


@pytest.mark.long
def test_the_wheel_is_complete(wheel: Path) -> None:
    """The wheel contains protocol sources, the type marker of each package, and the page with the
    library that draws its charts and its licence; it contains no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("shoal", "shoal_client", "shoal_proto", "shoal_server"):
        assert f"{package}/py.typed" in names
    assert {Path(name).name for name in names} >= {"membership.proto", "LICENSE"}
    assert any(name.startswith("shoal_server/status/") and name.endswith(".html") for name in names)
    vendor = "shoal_server/status/assets/vendor/uPlot"
    assert {f"{vendor}.{rest}" for rest in ("iife.min.js", "min.css", "LICENSE")} <= set(names)
    licences = [name for name in names if "/licenses/" in name and name.endswith("uPlot.LICENSE")]
    assert len(licences) == 1
    assert not any("test" in Path(name).parts[0] for name in names)


def test_the_wheel_is_for_linux_and_names_its_author(wheel: Path) -> None:
    """pip refuses the wheel on other systems; an index shows author and keywords."""
    assert wheel.name.endswith("-py3-none-manylinux_2_17_aarch64.manylinux_2_17_x86_64.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    assert "Author: The Shoal authors" in lines
    assert any(line.startswith("Keywords: ") and "elastic training" in line for line in lines)


IMPORT_ALL = """
import importlib, pkgutil
import shoal, shoal_client, shoal_proto, shoal_server
modules = []
for package in (shoal, shoal_client, shoal_proto, shoal_server):
    assert package.__file__.startswith(PREFIX), package.__file__
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    modules += [each.name for each in found]
for name in modules:
    # MPI's library is found beside the interpreter, and the wheels of this one are elsewhere.
    # Programs that have Shoal as their plug-in are not installed with it.
    plug_ins = ("shoal.integrations." + each for each in ("trl", "verl", "vllm"))
    if not name.endswith("__main__") and not name.startswith(("shoal.backends.mpi.", *plug_ins)):
        importlib.import_module(name)
print(len(modules))
"""


@pytest.mark.long
def test_every_module_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Modules of the four packages import from the new environment, not from the source."""
    prefix = f"PREFIX = {str(installed.parent)!r}\n"
    python = str(installed / "python")
    # Some modules are for Keras, which needs its backend named.
    number = run(python, "-c", prefix + IMPORT_ALL, cwd=tmp_path, KERAS_BACKEND="torch")
    assert int(number) > 50


@pytest.mark.long
def test_the_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`shoal` knows all of its sub-commands, and trains a script on a cluster of its own."""
    shoal = str(installed / "shoal")
    assert run(shoal, "--version", cwd=tmp_path).strip() == "shoal 1.0.0"
    for command in ("up", "run", "demo", "coordinator", "ps", "status"):
        assert f"shoal {command}" in run(shoal, command, "--help", cwd=tmp_path)
    script = tmp_path / "train.py"
    script.write_text((ROOT / "examples" / "train.py").read_text())
    output = run(shoal, "run", "-n", "1", "--ps", "0", str(script), cwd=tmp_path)
    assert "rank 0:" in output


@pytest.mark.long
def test_the_wheel_writes_the_data_of_the_demo(installed: Path, tmp_path: Path) -> None:
    target = tmp_path / "digits.npz"
    run(str(installed / "python"), "-m", "shoal.demo.data", str(target), cwd=tmp_path)
    assert target.stat().st_size > 100_000
    assert "--strategy" in run(
        str(installed / "python"), "-m", "shoal.demo.digits", "--help", cwd=tmp_path
    )
