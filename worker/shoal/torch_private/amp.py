"""Numbers of torch's GradScaler, as last read to the host.

Each read from the GPU waits for all work queued there. In a session only the session changes these
numbers.
"""

import ctypes
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_Marks = tuple[Tensor, int, Tensor, int]

_known: WeakKeyDictionary[torch.amp.GradScaler, tuple[_Marks, float, int]] = WeakKeyDictionary()


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return `scaler.state_dict()`; waits for the GPU only after other writes to the scaler's
    numbers.
    """
    marks = _marks_of(scaler)
    if marks is None:
        return scaler.state_dict()
    known = _known.get(scaler)
    if known is None or not _are_same(known[0], marks):
        state = scaler.state_dict()
        known = _known[scaler] = (marks, state["scale"], state["_growth_tracker"])
    return {
        "scale": known[1],
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": known[2],
    }


def scale_of(scaler: torch.amp.GradScaler) -> float:
    """Return `scaler.get_scale()`. Waits for the GPU only when `scaler_state` would."""
    scale: float = scaler_state(scaler)["scale"]
    return scale


def load_scaler_state(scaler: torch.amp.GradScaler, state: Mapping[str, Any]) -> None:
    """Call `scaler.load_state_dict(state)`, and note the numbers for `scaler_state`."""
    scaler.load_state_dict(dict(state))
    marks = _marks_of(scaler)
    if marks is not None:
        # Rounded as in the scaler's float32 tensor.
        scale = ctypes.c_float(state["scale"]).value
        _known[scaler] = (marks, scale, state["_growth_tracker"])


def _marks_of(scaler: torch.amp.GradScaler) -> _Marks | None:
    """Return the scaler's tensors with their numbers of writes, which change with each write. None
    before the first scaled loss, if disabled, and for a class with its own `state_dict`."""
    if type(scaler).state_dict is not torch.amp.GradScaler.state_dict or not scaler.is_enabled():
        return None
    scale, tracker = scaler._scale, scaler._growth_tracker
    if scale is None or tracker is None:
        return None
    return scale, scale._version, tracker, tracker._version


def _are_same(one: _Marks, other: _Marks) -> bool:
    return one[0] is other[0] and one[2] is other[2] and one[1::2] == other[1::2]
