"""Snapshot of a model's buffers, such as running means, at the beginning of a step."""

from collections.abc import Iterator, Mapping
from operator import is_

import torch
from torch import Tensor, nn

from shoal.model.gradients import is_on_host
from shoal.torch_private.modules import buffer_table, transient_buffers
from shoal.torch_private.tensors import foreach_copy_, num_writes
from shoal_proto.errors import InvalidSpec

_Table = dict[str, Tensor | None]
"""The dict in which a module keeps its buffers."""


class BufferSnapshot:
    """Copy of a model's buffers, which forward passes change and a failed step restores."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._lasting = _Lasting(None)
        self._all_tables: list[_Table] = []
        self._num_buffers = 0
        """Number of buffers of all modules at the last walk over the modules."""
        self._tables: list[tuple[_Table, frozenset[str]]] = []
        """Tables with transient buffers (not in the model's state_dict), and their names in it."""
        self._passing: dict[int, str] = {}
        """Names of transient buffers in the model, by the buffer's id."""
        self._before: list[_BufferCopy] = []
        self._copies: list[_BufferCopy] = []
        """Copies made for the last step, reused in the next."""
        self._refusal: InvalidSpec | None = None

    def keep(self, model: nn.Module) -> None:
        """Save the present contents of this model's buffers. Raises as `settle`."""
        if self._refusal is not None:
            raise self._refusal
        # A walk over the modules of a model takes longer than all else at the beginning of a step.
        if self._model is not model:
            self._look_at(model)
        elif sum(map(len, self._all_tables)) != self._num_buffers:
            # The script has added a buffer to a module, or removed one.
            self._lasting.settle()
            self._look_at(model)
        if not self._num_buffers:
            return
        self._lasting.keep()
        kept = {id(each.buffer): each for each in self._copies}
        self._before = self._copies = [
            before
            if (before := kept.get(id(buffer))) is not None and before.is_still_so()
            else _BufferCopy(buffer)
            for buffer in self._transient()
        ]

    def _look_at(self, model: nn.Module) -> None:
        self._model, self._lasting = model, _Lasting(model)
        parts = [(buffer_table(part), transient_buffers(part)) for part in model.modules()]
        self._all_tables = [table for table, _ in parts]
        self._num_buffers = sum(map(len, self._all_tables))
        self._tables = [(table, frozenset(names)) for table, names in parts if names]
        self._passing = _passing(model)

    def settle(self) -> None:
        """See `_Lasting.settle`."""
        self._lasting.settle()

    def before(self) -> Mapping[int, Tensor]:
        """Return the contents of persistent buffers when the step began, by the buffer's id."""
        return self._lasting.before()

    def changed(self) -> list[str]:
        """Name the transient buffers that were written to since."""
        return [
            self._passing[id(each.buffer)]
            for each in self._before
            if id(each.buffer) in self._passing
            and each.is_written()
            and not torch.equal(each.buffer, each.copy)
        ]

    def restore(self) -> None:
        """Write the saved contents back into the buffers."""
        self._lasting.restore()
        for each in self._before:
            each.restore()

    def clear(self) -> None:
        """Discard what `restore` would write, as the step is committed."""
        self._before = []

    def forget(self) -> None:
        """Release the model too. If `settle` refuses a buffer, the next step raises the error."""
        try:
            self._lasting.settle()
        except InvalidSpec as refusal:
            self._refusal = refusal
        self._model, self._lasting = None, _Lasting(None)
        self._all_tables, self._tables, self._passing = [], [], {}
        self._before, self._copies = [], []
        self._num_buffers = 0

    def _transient(self) -> Iterator[Tensor]:
        for table, names in self._tables:
            yield from (each for name in names if (each := table.get(name)) is not None)


class _BufferCopy:
    """Copy of a transient buffer, which often is a constant mask.

    On a GPU a copy is reused until the buffer is written to, by torch's count. On the host it is
    made anew for each step, which is cheap there and also covers writes that torch does not count.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.copy = buffer.detach().clone()
        self._num_writes, self._address = num_writes(buffer), buffer.data_ptr()

    def is_written(self) -> bool:
        """True if the buffer was written to since, by torch's count."""
        return num_writes(self.buffer) != self._num_writes

    def is_still_so(self) -> bool:
        """True if the copy is known to equal the buffer."""
        is_counted = not is_on_host(self.buffer) and not self.buffer.is_inference()
        return is_counted and not self.is_written() and self.buffer.data_ptr() == self._address

    def restore(self) -> None:
        """Write the copy back into the buffer."""
        if not self.is_still_so():
            self.buffer.detach().copy_(self.copy)


class _Lasting:
    """The persistent buffers of a model, which stay the same tensors throughout training.

    A module may replace a buffer by another tensor, as `self.count = self.count + 1` does. Code
    that collects the model's state refers to the first tensor, so the new value is copied into it.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._tables: list[_Table] = []
        self._names: list[str] = []
        self._buffers: list[Tensor] = []
        """A buffer for each (table, name), in their order; tied ones occur several times."""
        for part in model.modules() if model is not None else ():
            for name, buffer in buffer_table(part).items():
                if buffer is not None and name not in transient_buffers(part):
                    self._tables.append(buffer_table(part))
                    self._names.append(name)
                    self._buffers.append(buffer)
        self._once = list({id(buffer): buffer for buffer in self._buffers}.values())
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Save the present contents of the buffers."""
        self.settle()
        if not self._once:
            return
        with torch.no_grad():
            if not self._copies:
                self._copies = [torch.empty_like(buffer) for buffer in self._once]
            foreach_copy_(self._copies, self._once)

    def settle(self) -> None:
        """Copy the value of each replacement into the original buffer, and put that back.

        Raises InvalidSpec if a replacement has another shape or dtype: joiners have the original.
        """
        if not self._buffers:
            return
        present = list(map(dict.get, self._tables, self._names))
        if all(map(is_, present, self._buffers)):
            return
        given: dict[int, Tensor | None] = {}
        for name, buffer, now in zip(self._names, self._buffers, present, strict=True):
            if given.setdefault(id(buffer), now) is not now:
                raise _refusal(name, now, "the same one in all its places in the model")
            if now is None or (now.shape, now.dtype) != (buffer.shape, buffer.dtype):
                raise _refusal(name, now, f"{_outline(buffer)}, as it was before")
        values = [given[id(buffer)] for buffer in self._once]
        with torch.no_grad():
            foreach_copy_(self._once, [value for value in values if value is not None])
        self._reinstall()

    def before(self) -> Mapping[int, Tensor]:
        return dict(zip(map(id, self._once), self._copies, strict=True)) if self._copies else {}

    @torch.no_grad()
    def restore(self) -> None:
        self._reinstall()
        if self._copies:
            foreach_copy_(self._once, self._copies)

    def _reinstall(self) -> None:
        for table, name, buffer in zip(self._tables, self._names, self._buffers, strict=True):
            table[name] = buffer


def _refusal(name: str, seen: Tensor | None, expected: str) -> InvalidSpec:
    return InvalidSpec(
        f"another tensor replaced a module's buffer {name!r}",
        seen="nothing" if seen is None else _outline(seen),
        expected=expected,
        fix="Make it with its final size, and write to it in place.",
    )


def _outline(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _passing(model: nn.Module) -> dict[int, str]:
    return {
        id(buffer): f"{path}.{name}" if path else name
        for path, part in model.named_modules()
        for name in transient_buffers(part)
        if (buffer := buffer_table(part).get(name)) is not None
    }
