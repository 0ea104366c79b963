"""Properties of a model's devices that all members of a generation share."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.model.devices import devices_of


class OnCuda(nn.Module):
    """A model whose parameters say that they are on a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cuda", 0))


@pytest.mark.parametrize(("backend", "has_nccl"), [("nccl", True), ("", True), ("gloo", False)])
def test_nccls_version_is_only_compared_if_nccl_is_used(
    monkeypatch: pytest.MonkeyPatch, backend: str, has_nccl: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    nccl = {"nccl": "2.27.5"} if has_nccl else {}
    assert devices_of(OnCuda(), backend) == {"device": "cuda"} | nccl
    assert devices_of(nn.Linear(1, 1), backend) == {"device": "cpu"}
