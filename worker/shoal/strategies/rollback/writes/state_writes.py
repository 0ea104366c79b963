"""Writes of a script to the state of optimizers within a step."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.model.trained_parameters import are_same
from shoal.torch_private.tensors import all_writes, num_writes


class StateWrites:
    """Writes of a script to optimizers' state within a step: to reset momentum, for example, or to
    keep the original of weights that it perturbs.

    To undo a step, the objects that were in the state when it began are put back. Tensors that the
    script writes to in place, by torch's count of writes, are copied at the beginning of each later
    step. The first write in place cannot be undone.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        """The state when the step began."""
        self._contents: list[object] = []
        """All optimizers, keys and values in that state, in order."""
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._num_writes: list[int] = []
        """The tensors in that state, their names, and the number of writes to each."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors by id, each with its content when the step began."""
        self._written: set[str] = set()
        """Names of state that the script has written to in place, in all generations."""
        self._is_open = self._are_counted = False
        self._kept: Collection[int] = ()
        """Ids of tensors that were copied within the step, before an optimizer stepped."""
        self.is_lost = False
        """True if the script has written to a tensor without a copy in this step."""

    def begin(self, optimizers: Collection[Optimizer]) -> None:
        """Begin a step: note the state's objects, and copy those that the script writes to."""
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
        """Note the state's objects, as they differ from those at the last step."""
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
        """Attribute changes so far to the script."""
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
        """Note that an optimizer has stepped within the step, after `note`. `kept`: ids of the
        tensors of its state that were copied before."""
        self._kept = kept
        self._num_writes = self._counts()

    def settle(self) -> None:
        """Note that from here until the commit the session itself changes the state."""
        self.note()
        self._copies, self._is_open = {}, False

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Return a context with the state from when the step began, unless it `is_lost`."""
        begun = self._begun if self._is_open else []
        present = [(each, dict(each.state)) for each, _ in begun]
        self._put(begun, self._copies)
        try:
            yield
        finally:
            self._put(present, {})

    @torch.no_grad()
    def restore(self) -> bool:
        """Undo the step, after `note` and after updates within the step are undone; return True if
        the state is as when the step began."""
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
        """Release the optimizers' state."""
        self._begun, self._contents, self._names, self._tensors = [], [], [], []
        self._copies, self._is_open = {}, False


def _contents_of(optimizers: Iterable[Optimizer]) -> list[object]:
    """List optimizers, and the keys and values of their state."""
    contents: list[object] = []
    for each in optimizers:
        contents.append(each)
        for parameter, state in each.state.items():
            contents.append(parameter)
            contents += state
            contents += state.values()
    return contents
