"""The scripts of the folder deploy/, as modules."""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "deploy"


def load(name: str) -> ModuleType:
    """Import a script of the folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = util.spec_from_file_location(f"deploy_{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


credentials = load("credentials")
lock = load("lock")
gpu_bundle = load("gpu_bundle")
gpu_run = load("gpu_run")
small_nccl = load("small_nccl")
