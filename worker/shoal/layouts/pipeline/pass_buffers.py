"""Buffers that a forward pass changes, in a stage that runs the pass once for each micro-batch.

Each micro-batch begins with the values from before the pass, as one process does. If the new values
then depend on the samples or their number, the pass is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.torch_private.modules import buffer_table, has_batch_statistics
from shoal.torch_private.tensors import all_writes, num_writes
from shoal_proto.errors import InvalidSpec

FORWARD, BACKWARD = "forward", "backward"

_T = TypeVar("_T")
_Values = Mapping[int, Tensor]


class PassBuffers:
    """Buffers of one stage, except statistics over batches: see docs/strategies.md for those."""

    def __init__(self, model: nn.Module, refuse: Callable[[InvalidSpec], None]) -> None:
        """`refuse`: notifies all ranks of the error that this rank is about to raise."""
        self._refuse = refuse
        entries = [
            (f"{path}.{name}" if path else name, buffer_table(part), name)
            for path, part in model.named_modules()
            if not has_batch_statistics(part)
            for name, buffer in buffer_table(part).items()
            if buffer is not None
        ]
        self._names = [name for name, _, _ in entries]
        self._tables = [table for _, table, _ in entries]
        self._keys = [key for _, _, key in entries]
        self._buffers: list[Tensor | None] = [None] * len(entries)
        self._copies: list[Tensor] = []
        self._writes: list[int] = [-1] * len(entries)
        self._counted: list[Tensor] = []
        self._num_writes: list[int] = []
        """Number of writes to each of `_counted`, the buffers with writes that torch counts: a
        quick check."""
        self._changing: set[int] = set()
        """Indices of buffers that passes change, even if no write was counted."""
        self._first_values: dict[str, _Values] = {}
        self._at: str | None = None
        """`FORWARD` or `BACKWARD`: the operation of the first micro-batch that left the present
        values. None: they are from before the pass."""

    def begin(self) -> None:
        """Save the values of the buffers when a pass begins."""
        self._first_values, self._at = {}, None
        if not self._keys:
            return
        present = self._present()
        if self._copies and self._are_as_begun(present):
            return
        writes = list(map(_writes, present))
        self._counted = [each for each in present if each is not None and not each.is_inference()]
        if not self._copies:
            self._copies = [torch.empty(0)] * len(present)
        for index, buffer in enumerate(present):
            as_before = buffer is self._buffers[index] and writes[index] == self._writes[index]
            if buffer is not None and (not as_before or index in self._changing):
                self._copies[index] = buffer.detach().clone()
        self._buffers, self._writes = present, writes
        self._num_writes = all_writes(self._counted)

    @contextmanager
    def of_micro_batch(self, pass_kind: str) -> Iterator[None]:
        """Return a context for a forward or backward of one micro-batch. Raises InvalidSpec if it
        leaves other values than the pass' first micro-batch did."""
        if not self._keys:
            yield
            return
        self._restore(FORWARD if pass_kind == BACKWARD else None)
        yield
        values, first = self._changed(), self._first_values.get(pass_kind)
        if first is None:
            passed = self._first_values.get(FORWARD)
            # A backward without recomputation leaves the forward's values.
            first = values if passed is None or self._differing(passed, values) else passed
            self._first_values[pass_kind] = first
        else:
            self._compare(first, values, "one micro-batch, and another value after the next")
        self._at = FORWARD if first is self._first_values[FORWARD] else pass_kind

    def probe(self, run_one: Callable[[], _T], run_two: Callable[[], object]) -> _T:
        """Find the buffers that a pass over one micro-batch changes; return the result of the pass.
        Raises InvalidSpec if a pass over two micro-batches at once leaves other values. Changes are
        not undone."""
        self.begin()
        returned = run_one()
        values = self._changed(closely=True)
        self._changing |= values.keys()
        if values:
            self._overwrite({})
            try:
                run_two()
            except Exception as error:
                error.add_note(
                    "This was a pass over the samples of two micro-batches at once, to test if the"
                    f" number of samples changes buffers: {self._named(values)}"
                )
                raise
            of_both = self._changed(closely=True)
            self._changing |= of_both.keys()
            self._compare(values, of_both, "one micro-batch, and another value after two")
        return returned

    def _restore(self, pass_kind: str | None) -> None:
        if self._at != pass_kind:
            self._overwrite({} if pass_kind is None else self._first_values[pass_kind])
            self._at = pass_kind

    def _present(self) -> list[Tensor | None]:
        return list(map(dict.get, self._tables, self._keys))

    def _are_as_begun(self, present: list[Tensor | None]) -> bool:
        """True if no buffer was written since the pass began; False once one is known to change, as
        writes may not be counted."""
        return (
            not self._changing
            and all(map(is_, present, self._buffers))
            and all_writes(self._counted) == self._num_writes
        )

    def _changed(self, *, closely: bool = False) -> _Values:
        """Return the values that the pass has changed; `closely`: also find writes that torch does
        not count."""
        changed: dict[int, Tensor] = {}
        present = self._present()
        if not closely and self._are_as_begun(present):
            return changed
        for index, now in enumerate(present):
            buffer = self._buffers[index]
            if now is None or buffer is None:
                continue
            is_other = now is not buffer or _writes(now) != self._writes[index]
            if (
                is_other
                or index in self._changing
                or (closely and not _same(now, self._copies[index]))
            ):
                changed[index] = now.detach().clone()
        return changed

    @torch.no_grad()
    def _overwrite(self, values: _Values) -> None:
        present = self._present()
        if not values and self._are_as_begun(present):
            return
        for index, now in enumerate(present):
            buffer = self._buffers[index]
            if buffer is None:
                continue
            is_other = now is not buffer or _writes(buffer) != self._writes[index]
            if is_other or index in values or index in self._changing:
                self._tables[index][self._keys[index]] = buffer
                buffer.copy_(values.get(index, self._copies[index]))

    def _differing(self, first: _Values, second: _Values) -> list[int]:
        return [
            index
            for index in sorted(first.keys() | second.keys())
            if not _same(*(each.get(index, self._copies[index]) for each in (first, second)))
        ]

    def _compare(self, first: _Values, second: _Values, by: str) -> None:
        if differing := self._differing(first, second):
            refusal = _refusal(self._named(differing), f"one value after {by}")
            self._refuse(refusal)
            raise refusal

    def _named(self, indices: Sequence[int] | _Values) -> str:
        return ", ".join(self._names[index] for index in list(indices)[:5])


def _writes(buffer: Tensor | None) -> int:
    return -1 if buffer is None else num_writes(buffer)


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _refusal(names: str, seen: str) -> InvalidSpec:
    return InvalidSpec(
        f"a forward pass computes buffers from its samples, but a pipeline computes with"
        f" micro-batches: {names}",
        seen=seen,
        expected="buffers that depend neither on the samples of a pass nor on their number, so"
        " that they equal those of one process, with one pass over the whole batch",
        fix="Use microbatches=1, or compute the buffers after the step with session.all_reduce.",
    )
