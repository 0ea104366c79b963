"""Detection of writes to parameters; the caller knows if the script or the session wrote."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.model.gradients import is_on_host
from shoal.torch_private.dtensor import all_local
from shoal.torch_private.tensors import all_writes, num_writes

EVERY_STEPS, NUM_TURNS = 4, 7
"""Elements are compared every `EVERY_STEPS` steps, for 1/`NUM_TURNS` of the parameters.

`NUM_TURNS` is a prime, because scripts may write at regular intervals.
"""
NUM_ELEMENTS = 4
EVERY_STEPS_ON_GPU = 64
"""Larger, because a comparison waits for the GPU."""


def own_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this member's part of each tensor, in its present memory."""
    cut = [each for each in tensors if isinstance(each, DTensor)]
    parts = dict(zip(map(id, cut), all_local(cut), strict=True))
    return [parts.get(id(each), each) for each in tensors]


class OwnParts:
    """Parts of some parameters on this member, in this generation's memory.

    Quantised and sparse parameters are left out.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        plain = {name: each for name, each in parameters.items() if _is_plain(each)}
        cut = {name: each for name, each in plain.items() if isinstance(each, DTensor)}
        whole = {name: each for name, each in plain.items() if name not in cut}
        self.parameters: Mapping[str, Tensor] = {**whole, **cut}
        self._whole, self._cut = list(whole.values()), list(cut.values())
        self._counted = [*self._whole, *self._cut]
        self._names = [*whole, *cut, *cut]
        self._are_counted = not any(each.is_inference() for each in self._counted)

    def all(self) -> list[Tensor]:
        """Return the present part of each parameter: a script may have replaced its memory."""
        return [*self._whole, *all_local(self._cut)] if self._cut else self._whole

    def num_writes(self) -> list[int]:
        """Return the number of writes to each parameter; see `differing`."""
        if not self._are_counted:
            return list(map(num_writes, self._counted))
        own = all_writes(self._counted)
        # torch counts writes to a DTensor and to its local part separately.
        return own + all_writes(all_local(self._cut)) if self._cut else own

    def differing(self, one: Sequence[int], other: Sequence[int]) -> set[str]:
        """Return the names of the parameters whose numbers of writes differ."""
        counts = zip(self._names, one, other, strict=False)
        return {name for name, before, now in counts if before != now}


def _is_plain(parameter: Tensor) -> bool:
    wraps = hasattr(parameter, "__tensor_flatten__") and not isinstance(parameter, DTensor)
    return parameter.layout is torch.strided and not wraps


class ParameterWatch:
    """Finder of the parameters that were written to since `mark`.

    torch does not count writes through `.data`, nor by `torch._foreach` functions to DTensors. So a
    few elements are compared too: of all parameters with `closely`, else of some parameters in some
    steps. An uncounted write that leaves these elements unchanged is not detected.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._own = OwnParts(parameters)
        self._samples = list(map(_samples_of, _alike(self._own)))
        self._num_writes: list[int] = []
        self._num_steps = 0

    def mark(self) -> None:
        """Begin to look for writes."""
        self._num_steps += 1
        self._num_writes = self._own.num_writes()
        for samples in self._samples:
            samples.mark()

    def changed(self, *, closely: bool) -> set[str]:
        """Return the names of the parameters that were written to."""
        changed: set[str] = set()
        now = self._own.num_writes()
        if now != self._num_writes:
            changed = self._own.differing(now, self._num_writes)
        if closely or self._num_steps % EVERY_STEPS == 0:
            for samples in self._samples:
                changed |= samples.changed(self._turn(samples, closely=closely))
        return changed

    def _turn(self, samples: "_Samples", *, closely: bool) -> slice:
        num, every = samples.num, EVERY_STEPS_ON_GPU if samples.waits else EVERY_STEPS
        turn, rest = divmod(self._num_steps, every)
        if closely or rest:
            return slice(0, num if closely else 0)
        turn %= NUM_TURNS
        return slice(turn * num // NUM_TURNS, (turn + 1) * num // NUM_TURNS)


def _alike(own: OwnParts) -> Iterable[Mapping[str, Tensor]]:
    alike: dict[tuple[torch.device, torch.dtype | None], dict[str, Tensor]] = {}
    for name, part in zip(own.parameters, own.all(), strict=True):
        key = (part.device, None if is_on_host(part) else part.dtype)
        alike.setdefault(key, {})[name] = own.parameters[name]
    return alike.values()


def _samples_of(alike: Mapping[str, Tensor]) -> "_Samples":
    own = OwnParts(alike).all()
    return _OnHost(alike) if all(map(is_on_host, own)) else _OnDevice(alike)


class _Samples(ABC):
    waits: ClassVar[bool]

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._own = OwnParts(parameters)
        self._names = list(self._own.parameters)
        self._addresses = [each.data_ptr() for each in self._own.all()]
        self._views = [_elements(own) for own in self._own.all()]

    @abstractmethod
    def mark(self) -> None:
        """Save the present elements."""

    @property
    def num(self) -> int:
        return len(self._names)

    def changed(self, turn: slice) -> set[str]:
        names, known = self._names[turn], self._addresses[turn]
        if not names:
            return set()
        addresses = [each.data_ptr() for each in self._own.all()[turn]]
        changed = {n for n, one, other in zip(names, addresses, known, strict=True) if one != other}
        return changed | self._written(turn)

    @abstractmethod
    def _written(self, turn: slice) -> set[str]:
        """Return the names of the parameters whose elements differ from those at `mark`."""


class _OnHost(_Samples):
    """Samples on the host, read as bytes: torch's functions would take about ten times as long."""

    waits = False

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        # `_views` keeps the memory alive.
        self._bytes = [
            (ctypes.c_char * (view.numel() * view.element_size())).from_address(view.data_ptr())
            for view in self._views
        ]
        self._before: list[bytes] = []

    def mark(self) -> None:
        self._before = list(map(bytes, self._bytes))

    def _written(self, turn: slice) -> set[str]:
        now = map(bytes, self._bytes[turn])
        known = zip(self._names[turn], now, self._before[turn], strict=True)
        return {name for name, one, other in known if one != other}


class _OnDevice(_Samples):
    """Samples on a device, concatenated, so that one comparison waits for all."""

    waits = True

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._ends = [0, *accumulate(view.numel() for view in self._views)]
        self._before = torch.cat(self._views)

    def mark(self) -> None:
        torch.cat(self._views, out=self._before)

    def _written(self, turn: slice) -> set[str]:
        views = self._views[turn]
        now, before = torch.cat(views), self._before[self._ends[turn.start] : self._ends[turn.stop]]
        if now.equal(before):
            return set()
        parts = torch.split(before, [view.numel() for view in views])
        pairs = zip(self._names[turn], views, parts, strict=True)
        return {name for name, view, part in pairs if not _have_same_bits(view, part)}


def _elements(own: Tensor) -> Tensor:
    """Return a view of a few elements. They are adjacent: scattered elements would take four times
    as long to concatenate."""
    held = own.detach()
    if not held.numel():
        return held.reshape(-1)
    pairs = zip(held.shape, held.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    count = min(NUM_ELEMENTS, extent)
    return held.as_strided((count,), (1,), held.storage_offset() + (extent - count) // 2)


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """True if the bits are equal; unlike in torch.equal, a NaN equals itself."""
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
