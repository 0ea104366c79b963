"""Groups that behave as NCCL's do, on a CPU: for faults that otherwise only a GPU shows.

- A collective is "done" as soon as it is begun: its future is complete, and what it is to bring is
  not there yet.
- What it brings is there for whoever waits for the work, and for nobody else. On a GPU that is the
  stream of the thread that waits; here it is the thread.
- What is aborted ends well, with half of what it was to bring.

Only `int64` travels as on the host, as the small messages do by which members agree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from support.collectives.strategy_runs import TheRunsOwn
from torch import Tensor

from shoal.backends.in_memory import group as in_memory
from shoal.backends.in_memory.group import InMemoryGroup
from shoal.backends.in_memory.meeting import Complete
from shoal.backends.process_group.pending import Pending
from shoal.torch_private.c10d import abort_on
from shoal.torch_private.tensors import pytree
from shoal_proto.errors import GenerationBroken

LEFT = [0.0]
"""What is in the half that an aborted collective did not bring: the last one counts."""


class LateWork(Pending):
    """A collective whose results arrive when it is waited for."""

    def __init__(self, inner: Pending, arrivals: Sequence[tuple[Tensor, Tensor]], group: Any):
        super().__init__([result for result, _ in arrivals], group.timeout_s)
        self._inner, self._arrivals, self._group = inner, arrivals, group

    def finish(self, timeout_s: float) -> None:
        self._inner.finish(timeout_s)
        arrivals, self._arrivals = self._arrivals, ()
        for result, arrived in arrivals:
            if self._group.aborted:
                half = result.view(-1)[: result.numel() // 2]
                half.fill_(self._group.left if half.is_floating_point() else 0)
            else:
                result.copy_(arrived)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with torch.no_grad():
            return super().wait(timeout)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return not self._arrivals


class LateGroup(InMemoryGroup):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aborted = False
        self.left = LEFT[-1]

    def abort(self) -> None:
        self.aborted = True

    def _post(
        self, kind: str, results: Sequence[Tensor], given: Any, complete: Complete
    ) -> Pending:
        if results and all(result.dtype is torch.int64 for result in results):
            return super()._post(kind, results, given, complete)
        # What other ranks write into are copies; what comes of them is shown to who waits.
        shadows: dict[int, Tensor] = {}

        def shadow(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return shadows.setdefault(id(leaf), leaf.detach().clone())

        inner = super()._post(kind, [], pytree.tree_map(shadow, given), complete)
        return LateWork(inner, [(each, shadows[id(each)]) for each in results], self)


class LateRunGroup(TheRunsOwn):
    """A late group of a run of ranks as that of a generation, which can be cut."""

    def __init__(self) -> None:
        self._reason = ""

    def cut(self, reason: str) -> None:
        self._reason = reason
        abort_on(torch.device("cpu"))

    def check(self) -> None:
        if self._reason:
            raise GenerationBroken("a collective was aborted", seen=self._reason)


@contextmanager
def late_groups(left: float = 0.0) -> Iterator[None]:
    """Within, every in-memory group is a late one. `left`: what an aborted one leaves."""
    module: Any = in_memory
    module.InMemoryGroup = LateGroup
    LEFT.append(left)
    try:
        yield
    finally:
        LEFT.pop()
        module.InMemoryGroup = InMemoryGroup
