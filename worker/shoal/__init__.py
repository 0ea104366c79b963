"""Elastic training for PyTorch.

import shoal

with shoal.join("digits") as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    for batch in session.batches(dataset, global_batch_size=256, epochs=10):
        with session.step():
            loss = loss_fn(model(batch.inputs), batch.targets)
            session.backward(loss)
"""

import ast
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shoal_proto  # noqa: F401 - before gRPC: see shoal_proto.forks.grpc
from shoal_proto.errors import InvalidSpec


def __getattr__(name: str) -> Any:
    # `shoal run` imports this package too, and must not wait for torch.
    if name == "__all__":
        return sorted(_module_by_export())
    if name == "__version__":
        return version("shoal")
    if name not in _module_by_export():
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = globals()[name] = getattr(_imported(_module_by_export()[name]), name)
    return value


def _imported(module: str) -> Any:
    """Import a module of Shoal. Raises InvalidSpec if numpy, which torch does not require, is
    missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != "numpy":
            raise
        raise InvalidSpec(
            "Shoal needs numpy beside torch",
            seen="no numpy in this environment",
            expected="numpy 1.26 or newer",
            fix="pip install 'numpy>=1.26'",
        ) from missing


def __dir__() -> list[str]:
    return sorted(["__all__", "__version__", *_module_by_export()])


@cache
def _module_by_export() -> dict[str, str]:
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
