"""The layout of several models: which of them a pass trains."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.layouts.several import SeveralLayouts
from shoal.model.several import SeveralModels
from shoal_proto.errors import InvalidSpec


def test_a_backward_pass_that_trains_no_model_is_refused() -> None:
    models = SeveralModels({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    each: Any = SimpleNamespace(data_index=0, data_count=1, elementwise=True)
    world: Any = None
    layout = SeveralLayouts(models, {"first": each, "second": each}, world)
    loss = models["first"](torch.ones(1)).sum()
    with pytest.raises(InvalidSpec, match="at least one of first, second"):
        layout.backward(loss, 1.0)
