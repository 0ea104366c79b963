"""Modules that may use private names of torch."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.gradients import local_gradients
from shoal.layouts.tensor.parts import local
from shoal.torch_private import c10d, check_version
from shoal.torch_private.dtensor import local_of
from shoal_proto.errors import InvalidSpec

ROOT = Path(shoal.__file__).parent
PRIVATE = ROOT / "torch_private"


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield dotted names of torch, imported or accessed, with a part that begins with an
    underscore."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {a.asname or "torch": a.name for a in node.names if is_torch(a.name)}
            aliases |= {k: v if k != "torch" else "torch" for k, v in found.items()}
            yield from (name for name in found.values() if is_private(name))
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
            found = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            aliases |= found
            yield from (name for name in found.values() if is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = name_of(node, aliases)
            if dotted is not None and is_private(dotted):
                yield dotted


def name_of(node: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = name_of(node.value, aliases)
    return None if owner is None else f"{owner}.{node.attr}"


def is_torch(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == "torch"


def is_private(name: str) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def test_only_torch_private_uses_private_names_of_torch() -> None:
    files = [path for path in ROOT.rglob("*.py") if not path.is_relative_to(PRIVATE)]
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in private_names(ast.parse(path.read_text()))
    }
    assert not found


def test_only_torch_private_accesses_private_attributes_of_torchs_objects() -> None:
    files = [path for path in ROOT.rglob("*.py") if not path.is_relative_to(PRIVATE)]
    found = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in reached_into(ast.parse(path.read_text()))
    }
    assert not found


def reached_into(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield private attributes of torch's objects that are accessed on anything but `self`, except
    names that a class of the module has too."""
    names = private_attributes() - set(own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and not is_own(node.value):
            yield node.lineno, node.attr


@cache
def private_attributes() -> frozenset[str]:
    """Private attributes of a module, an optimizer, a scheduler, a group, and fully_shard's state
    of a module."""
    attention = nn.MultiheadAttention(2, 1)
    optimizer = SGD(attention.parameters(), lr=0.1)
    schedules = [LambdaLR(optimizer, lambda step: 1.0), LambdaLR(optimizer, lambda step: 1.0)]
    schedule = SequentialLR(optimizer, schedules, milestones=[2])
    gloo = (c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options)
    found = [attention, optimizer, schedule, *gloo, DeviceMesh, DTensor, FSDPState, FSDPParamGroup]
    names = {name for each in found for name in dir(each)} | {"_opt_called", "_training_state"}
    return frozenset(name for name in names if is_private(name))


def own_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_own(node.value):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@pytest.mark.parametrize(
    "code",
    [
        "def f(part):\n    return part._buffers",
        "def f(part):\n    part._non_persistent_buffers_set.add('x')",
        "def f(optimizer):\n    optimizer._opt_called = True",
        "class A:\n    def f(self):\n        self._state._training_state = 0",
    ],
)
def test_access_to_a_private_attribute_is_found(code: str) -> None:
    assert list(reached_into(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._foreach_norm([])",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch._C import x",
        "from torch.distributed.tensor.debug import _clear_sharding_prop_cache",
        "import torch.utils._pytree",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert list(private_names(ast.parse(code)))


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.15.0", "3.0", "a-build-of-my-own"])
def test_a_torch_that_is_new_enough_passes(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.8.0", "1.13.1", "2.8.0a0+git1"])
def test_an_older_torch_is_refused_by_name(version: str) -> None:
    with pytest.raises(InvalidSpec, match="too old") as refused:
        check_version(version)
    assert version in refused.value.seen
    assert refused.value.expected == "torch 2.9 or newer"


def test_an_environment_without_numpy_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import shoal; shoal.join"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "Shoal needs numpy beside torch" in ran.stderr
    assert "pip install 'numpy>=1.26'" in ran.stderr


def whole_and_cut() -> tuple[bool, bool]:
    """Two predicates of a gradient that came whole: True if it is returned cut, and True if it is
    in the memory that autograd keeps."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    rows = torch.arange(6.0).view(2, 3)
    weight = nn.Parameter(distribute_tensor(rows, mesh, [Shard(1)]))
    weight.grad = distribute_tensor(rows, mesh, [Replicate()])
    found = local_gradients({"weight": weight})["weight"]
    own = rows[:, :2] if rank == 0 else rows[:, 2:]
    return torch.equal(found, own), found is local_of(weight.grad)


def test_a_gradient_that_came_whole_counts_once_on_each_rank() -> None:
    assert run_in_memory(whole_and_cut, 2) == [(True, True)] * 2


def columns() -> bool:
    """True if the gradient of a weight that is cut by columns, unevenly, is cut like the weight."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(1)]))
    (local(weight) * 2).sum().backward()
    gradient = weight.grad
    assert isinstance(gradient, DTensor)
    return gradient.placements == weight.placements and gradient.stride() == weight.stride()


def test_a_gradient_comes_cut_as_its_parameter_is() -> None:
    assert run_in_memory(columns, 2) == [True, True]


def derived() -> int:
    for _ in range(20):
        with FakeTensorMode():
            torch.ones(3) + 1
    return 1


def test_ranks_that_are_threads_leave_the_guard_of_devices_alone() -> None:
    """Ranks that are threads do not replace torch's guard of CUDA devices: in a CUDA build without
    a GPU, a second thread that does so ends the process."""
    before = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    for _ in range(2):
        assert run_in_memory(derived, 3) == [1, 1, 1]
    assert getattr(torch._C, "_ensureCUDADeviceGuardSet", None) is before
