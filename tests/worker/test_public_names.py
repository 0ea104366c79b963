"""Names that `import shoal` exports."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import shoal


@pytest.mark.parametrize("name", shoal.__all__)
def test_each_export_is_found_by_its_name(name: str) -> None:
    assert name in dir(shoal)
    assert getattr(shoal, name).__name__ == name


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, shoal; print('torch' in sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "False"


def test_the_launcher_imports_neither_torch_nor_numpy() -> None:
    """torch would take 150 MB of memory on each host, and CPU time from workers at its exit."""
    code = "import sys, shoal.launcher.command; print({'torch', 'numpy'} & set(sys.modules))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "set()"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        shoal.jion  # noqa: B018


def test_the_exports_are_those_of_the_stub() -> None:
    stub = Path(shoal.__file__).with_suffix(".pyi").read_text()
    assert shoal.__all__ == sorted(shoal.__all__)
    assert all(f"{name} as {name}" in stub for name in shoal.__all__)


def test_dir_shows_only_public_names() -> None:
    """The list has no `Path` and no `Any`: tab completion shows only names for users."""
    assert set(dir(shoal)) == {*shoal.__all__, "__all__", "__version__"}
    assert shoal.__version__ == version("shoal")
