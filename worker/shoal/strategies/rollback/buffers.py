"""Buffers of a model, such as running means, which a step may change or replace."""

from collections.abc import Iterable, Mapping
from operator import is_

import torch
from torch import Tensor, nn

from shoal.state.shards import outline_of
from shoal.torch_private.modules import buffer_table, transient_buffers
from shoal.torch_private.tensors import foreach_copy_
from shoal_proto.errors import InvalidSpec

_Table = dict[str, Tensor | None]


class StepBuffers:
    """The buffers of a model, which forward passes of a step may change.

    `refuses_late`: persistent buffers that are made after the first step began raise InvalidSpec.
    """

    def __init__(self, *, refuses_late: bool = True) -> None:
        self._refuses_late = refuses_late
        self._model: nn.Module | None = None
        self.lasting = PersistentBuffers(None)
        self._all_tables: list[_Table] = []
        self._num_buffers = 0
        self._tables: list[tuple[_Table, frozenset[str]]] = []
        """Tables with transient buffers (not in the model's state_dict), and the buffers' names."""
        self._names_by_id: Mapping[int, str] = {}
        self._refusal: InvalidSpec | None = None

    def begin(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Begin a step; return the persistent buffers and the transient ones.

        Raises what `PersistentBuffers.settle` raises, or the error that `forget` has kept.
        """
        if self._refusal is not None:
            raise self._refusal
        # A walk over the modules takes longer than all else at the beginning of a step.
        if self._model is not model:
            self._scan(model)
        elif not self._refuses_late or sum(map(len, self._all_tables)) != self._num_buffers:
            # The script may have added a buffer to a module, or removed one.
            known = self.lasting
            known.settle()
            self._scan(model)
            if self._refuses_late:
                self.lasting.refuse_others_than(known)
        self.lasting.settle()
        transient = [
            each
            for table, names in self._tables
            for name in names
            if (each := table.get(name)) is not None
        ]
        return self.lasting.buffers, transient

    def _scan(self, model: nn.Module) -> None:
        self._model = model
        self.lasting = PersistentBuffers(model, refuses_late=self._refuses_late)
        parts = [(buffer_table(part), transient_buffers(part)) for part in model.modules()]
        self._all_tables = [table for table, _ in parts]
        self._num_buffers = sum(map(len, self._all_tables))
        self._tables = [(table, frozenset(names)) for table, names in parts if names]
        self._names_by_id = {
            id(buffer): f"{path}.{name}" if path else name
            for path, part in model.named_modules()
            for name in transient_buffers(part)
            if (buffer := buffer_table(part).get(name)) is not None
        }

    def names_of(self, buffers: Iterable[Tensor]) -> list[str]:
        """Return the names of the transient buffers among these buffers."""
        return [self._names_by_id[id(each)] for each in buffers if id(each) in self._names_by_id]

    def forget(self) -> None:
        """Release the model. If `settle` refuses a buffer, every later step raises the error."""
        try:
            self.lasting.settle()
        except InvalidSpec as refusal:
            self._refusal = refusal
        self._model, self.lasting = None, PersistentBuffers(None)
        self._all_tables, self._tables, self._names_by_id = [], [], {}
        self._num_buffers = 0


class PersistentBuffers:
    """The persistent buffers of a model, which stay the same tensors throughout training.

    A module may replace a buffer, as `self.count = self.count + 1` does: the new value is copied
    into the first tensor.
    """

    def __init__(self, model: nn.Module | None, *, refuses_late: bool = True) -> None:
        self._tables: list[_Table] = []
        self._names: list[str] = []
        self._entries: list[Tensor] = []
        self._empty: list[tuple[_Table, str]] = []
        """Buffers that are None, and must stay so."""
        for part in model.modules() if model is not None else ():
            for name, buffer in buffer_table(part).items():
                if name in transient_buffers(part):
                    continue
                if buffer is None and refuses_late:
                    self._empty.append((buffer_table(part), name))
                elif buffer is not None:
                    self._tables.append(buffer_table(part))
                    self._names.append(name)
                    self._entries.append(buffer)
        self.buffers = list({id(buffer): buffer for buffer in self._entries}.values())

    def refuse_others_than(self, known: "PersistentBuffers") -> None:
        """Raise InvalidSpec if there is a buffer that `known` does not have."""
        before = {
            (id(table), name) for table, name in zip(known._tables, known._names, strict=True)
        }
        for table, name, buffer in zip(self._tables, self._names, self._entries, strict=True):
            if (id(table), name) not in before:
                raise _late(name, buffer)

    def settle(self) -> None:
        """Copy the value of each replacement into the original buffer, and put the original back.

        Raises InvalidSpec if a buffer was removed, if its replacement has another shape or dtype
        or differs between the uses of a tied buffer, or if a buffer was None before.
        """
        for table, name in self._empty:
            if (filled := table.get(name)) is not None:
                raise _late(name, filled)
        if not self._entries:
            return
        present = list(map(dict.get, self._tables, self._names))
        if all(map(is_, present, self._entries)):
            return
        given: dict[int, Tensor | None] = {}
        for name, buffer, now in zip(self._names, self._entries, present, strict=True):
            if given.setdefault(id(buffer), now) is not now:
                raise _refusal(name, now, "the same tensor wherever the model uses it")
            if now is None or (now.shape, now.dtype) != (buffer.shape, buffer.dtype):
                raise _refusal(name, now, f"{outline_of(buffer)}, as it was before")
        values = [value for buffer in self.buffers if (value := given[id(buffer)]) is not None]
        held = {_memory(buffer) for buffer in self.buffers}
        with torch.no_grad():
            # Modules may exchange tensors: `self.before = self.now`. A copy into one buffer must
            # not change the value of another.
            values = [
                value.clone() if value is not buffer and _memory(value) in held else value
                for value, buffer in zip(values, self.buffers, strict=True)
            ]
            foreach_copy_(self.buffers, values)
        self.reinstall()

    def reinstall(self) -> None:
        """Put the original buffers back in the place of their replacements."""
        for table, name, buffer in zip(self._tables, self._names, self._entries, strict=True):
            table[name] = buffer


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refusal(name: str, seen: Tensor | None, expected: str) -> InvalidSpec:
    return InvalidSpec(
        f"another tensor replaced a module's buffer {name!r}",
        seen="nothing" if seen is None else outline_of(seen),
        expected=expected,
        fix="Create the buffer with its final size, and write to it in place.",
    )


def _late(name: str, seen: Tensor) -> InvalidSpec:
    return InvalidSpec(
        f"a module made its persistent buffer {name!r} after distribute",
        seen=outline_of(seen),
        expected="the persistent buffers that the model had in distribute: checkpoints and other"
        " members have no others",
        fix="Create the buffer with its final size before distribute, and write to it in place; or"
        " register it with persistent=False.",
    )
