"""What a script writes to the state of optimizers within a step."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.model.trained_parameters import are_same
from shoal.torch_private.tensors import all_writes, num_writes


class StateWrites:
    """What a script writes to optimizers' state within a step: as one that begins anew without
    momentum, or keeps there what it perturbs weights from.

    What stands there when a step begins is put back. What is written to in place is copied as the
    step begins, once the script was seen to do so: by torch's count of writes. The first time that
    it does, it cannot be taken back.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        """What stood there when the step began."""
        self._contents: list[object] = []
        """All of that, one after the other."""
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._num_writes: list[int] = []
        """The tensors in it, what each is to its parameter, and how often they were written to."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity: a tensor, and what was in it."""
        self._written: set[str] = set()
        """What the script has written to in place. Over all generations."""
        self._is_open = self._are_counted = False
        self._kept: Collection[int] = ()
        """What has been copied within the step, by identity: before an optimizer stepped."""
        self.is_lost = False
        """Whether a tensor was written to in this step of which there is no copy."""

    def begin(self, optimizers: Collection[Optimizer]) -> None:
        """A step begins."""
        contents = _contents_of(optimizers)
        if not are_same(contents, self._contents):
            self._look(optimizers)
            self._contents = contents
        self._copies = self._copied() if self._written else {}
        self._is_open, self._kept, self.is_lost = True, (), False
        self._num_writes = self._counts()

    @torch.no_grad()
    def _copied(self) -> dict[int, tuple[Tensor, Tensor]]:
        pairs = zip(self._names, self._tensors, strict=True)
        return {id(each): (each, each.clone()) for name, each in pairs if name in self._written}

    def _look(self, optimizers: Iterable[Optimizer]) -> None:
        """Something else stands there than at the step before."""
        self._begun = [
            (each, {parameter: dict(state) for parameter, state in each.state.items()})
            for each in optimizers
        ]
        found = [
            (name, value)
            for _, states in self._begun
            for state in states.values()
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]
        self._names, self._tensors = [name for name, _ in found], [each for _, each in found]
        self._are_counted = not any(each.is_inference() for each in self._tensors)

    def _counts(self) -> list[int]:
        if self._are_counted:
            return all_writes(self._tensors)
        return list(map(num_writes, self._tensors))

    def note(self) -> None:
        """What has changed by now the script has written."""
        if not self._is_open:
            return
        now = self._counts()
        if now == self._num_writes:
            return
        counts = zip(self._names, self._tensors, now, self._num_writes, strict=True)
        for name, tensor, count, before in counts:
            if count != before:
                self._written.add(name)
                has_copy = id(tensor) in self._copies or id(tensor) in self._kept
                self.is_lost = self.is_lost or not has_copy

    def updated(self, kept: Collection[int]) -> None:
        """Behind `note`, an optimizer has stepped within the step. `kept`: the tensors of its state
        that were copied before, by identity."""
        self._kept = kept
        self._num_writes = self._counts()

    def settle(self) -> None:
        """From here on the session changes the state, with a step that is then committed."""
        self.note()
        self._copies, self._is_open = {}, False

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Within, the state is that which the step began with, unless it `is_lost`."""
        begun = self._begun if self._is_open else []
        present = [(each, dict(each.state)) for each, _ in begun]
        self._put(begun, self._copies)
        try:
            yield
        finally:
            self._put(present, {})

    @torch.no_grad()
    def restore(self) -> bool:
        """The step does not happen, and `note` has seen that; whether the state is as it was.
        Updates within the step are taken back already."""
        if not self._is_open:
            return True
        self._is_open = False
        for tensor, before in self._copies.values():
            tensor.copy_(before)
        self._put(self._begun, {})
        return not self.is_lost

    @staticmethod
    def _put(
        states: Iterable[tuple[Optimizer, Mapping[Tensor, dict[str, Any]]]],
        copies: Mapping[int, tuple[Tensor, Tensor]],
    ) -> None:
        for optimizer, state in states:
            optimizer.state.clear()
            for parameter, values in state.items():
                optimizer.state[parameter] = {
                    name: copies[id(value)][1] if id(value) in copies else value
                    for name, value in values.items()
                }

    def forget(self) -> None:
        """Let go of the optimizers' state."""
        self._begun, self._contents, self._names, self._tensors = [], [], [], []
        self._copies, self._is_open = {}, False


def _contents_of(optimizers: Iterable[Optimizer]) -> list[object]:
    """Optimizers, and what stands in their state, with its names."""
    contents: list[object] = []
    for each in optimizers:
        contents.append(each)
        for parameter, state in each.state.items():
            contents.append(parameter)
            contents += state
            contents += state.values()
    return contents
