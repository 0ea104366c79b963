"""Calls that members make together between two steps, repeated if a member is lost."""

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.gather import (
    barrier,
    barrier_after_collective,
    gather,
    gather_if_different,
)
from shoal.backends.abortable.waiter import all_reduce
from shoal.membership.generation import Generation
from shoal.session.elastic_controller import ElasticController
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import GenerationBroken, InvalidSpec, JobFinished
from shoal_proto.numbers_given import plain_number

T = TypeVar("T")
Value = float | int | Tensor | Mapping[str, float | int | Tensor]
Reduction = Literal["sum", "mean", "max", "min"]
MAX_BYTES = 1 << 30
"""Limit of the bytes reduced in one call, which is meant for metrics, not for state."""
MAX_REASON_CHARS = 200
HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)
_COUNTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = (*HALVES, torch.float32, torch.float64, *_COMPLEX, *_COUNTS)
_EXTREMES = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class SharedCalls:
    """Shared calls of one session. A call returns once all members have its result. If a member is
    lost while they confirm this, the next call begins with a new generation."""

    def __init__(self, controller: ElasticController, fields: dict[str, str]) -> None:
        """`fields`: the proposal's fields."""
        self._controller = controller
        self._fields = fields

    def run(self, call: str, attempt: Callable[[Generation, dist.ProcessGroup], T]) -> T:
        """Return the result of `attempt`, repeated until no member is lost meanwhile. `call`
        describes the call and must be the same on all members."""
        strategy = self._strategy(call)
        position = strategy.position
        self._controller.call.check_end(call, strategy.step)
        # A member that joins now would be at another point of its script.
        self._controller.call.is_under_way = True
        try:
            if position.unconfirmed:
                # Some members may lack the last call's result.
                self._recover(GenerationBroken("a member was lost after a call between two steps"))
                self._controller.present_or_next_generation(self._fields)
            position.in_call = True
            while True:
                generation = self._controller.present_or_next_generation(self._fields)
                self._controller.call.check_end(call, strategy.step)
                group = strategy.group
                position.set_wait_point(call, is_call=True)
                try:
                    self._check_call(call, generation, group)
                    result = attempt(generation, group)
                except Exception as error:  # noqa: BLE001 - raised again, unless a peer was lost
                    self._recover_in(call, error)
                else:
                    position.note_result(confirmed=self.confirm(group))
                    return result
        finally:
            self._controller.call.is_under_way = position.in_call = False
            position.set_wait_point("")

    def confirm(self, group: dist.ProcessGroup) -> bool:
        """Wait until all members have the result; False if a member is lost meanwhile: some may
        lack it."""
        try:
            barrier(group)
        except RuntimeError as error:
            if not self._controller.is_break(error):
                raise
            return False
        return True

    def all_reduce(self, value: Value, op: Reduction) -> Any:
        """See `Session.all_reduce`."""
        if op not in _OF_NUMBERS:
            raise InvalidSpec("op is unknown", seen=op, expected=str([*_OF_NUMBERS]))
        values = values_by_name(value, op)

        def attempt(generation: Generation, group: dist.ProcessGroup) -> dict[str, Any]:
            return reduce(values, op, group, generation)

        results = self.run(f"session.all_reduce(op={op!r})", attempt)
        return results if isinstance(value, Mapping) else results[""]

    def _recover(self, error: Exception) -> None:
        if not self._controller.is_break(error):
            raise error
        # The frames hold the wrapped model, and so the group that must be freed.
        traceback.clear_frames(error.__traceback__)
        self._controller.recover(error)

    def _recover_in(self, call: str, error: Exception) -> None:
        try:
            self._recover(error)
        except JobFinished as finished:
            raise InvalidSpec(
                f"{call} was made by this member alone",
                seen="the other members have left the session, which finished the job",
                expected=f"{call} on every member, within the session",
            ) from finished

    def _strategy(self, call: str) -> SynchronousStrategy:
        strategy = self._controller.strategy
        if not isinstance(strategy, SynchronousStrategy):
            raise InvalidSpec(
                f"{call} needs members that take their steps together",
                seen=f"strategy {strategy.name}",
                expected="a synchronous strategy; under other strategies each member does it alone",
            )
        if not self._controller.call.may_be_made:
            raise InvalidSpec(
                f"{call} before the first batch",
                seen="no batch that this member's script has asked for",
                expected="the call after a step: a member that joins later would make an earlier"
                " call alone",
            )
        return strategy

    def _check_call(self, call: str, generation: Generation, group: dist.ProcessGroup) -> None:
        calls = gather_if_different(call.encode(), group)
        if calls is not None:
            barrier_after_collective(group)
            by_member = zip(generation.entries, calls, strict=True)
            raise InvalidSpec(
                "the members make different calls between two steps",
                seen="; ".join(f"{each.member_id}: {call.decode()}" for each, call in by_member),
                expected="the same calls in the same order on every member",
            )


def stop(controller: ElasticController, reason: str, *, has_batches: bool, in_step: bool) -> None:
    """See `Session.stop`."""
    strategy = controller.strategy
    if not isinstance(strategy, SynchronousStrategy) or not has_batches:
        raise InvalidSpec(
            "session.stop without batches that all members take together",
            seen=f"strategy {strategy.name}",
            expected="session.batches of a synchronous strategy; otherwise `shoal stop JOB`",
        )
    strategy.position.stop(strategy.step + int(in_step), reason[:MAX_REASON_CHARS])


def present(
    controller: ElasticController, fields: dict[str, str], *, has_batches: bool
) -> Generation:
    """Return the present generation, for a script that asks for its rank. Form it if needed."""
    if controller.generation is not None:
        return controller.generation
    if not has_batches:
        raise InvalidSpec(
            "there is no generation yet",
            expected="to ask for rank and world size after session.batches(...), or from"
            " the first step on",
        )
    return controller.present_or_next_generation(fields)


def note_loss(error: BaseException, controller: ElasticController) -> None:
    """Add advice to the error if a member was lost in the script's own collective between steps."""
    if controller.is_break(error) and controller.strategy.is_failure(error):
        error.add_note(
            "A member was lost in a collective call that the script makes between two steps. "
            "In session.evaluate, session.all_reduce and session.state_dict such a call begins "
            "again with the remaining members."
        )


def values_by_name(value: Value, op: Reduction = "sum") -> dict[str, float | int | Tensor]:
    """Return values by name, in the form in which they are reduced; a single value has the name "".
    Booleans and integers become int64, so that sums do not wrap. Raises InvalidSpec for values that
    cannot be reduced."""
    given = dict(value) if isinstance(value, Mapping) else {"": value}
    values = {name: _reducible(name, each, op) for name, each in given.items()}
    num_bytes = sum(each.nbytes if isinstance(each, Tensor) else 8 for each in values.values())
    if num_bytes > MAX_BYTES:
        raise InvalidSpec(
            "too many bytes to be reduced in one call",
            seen=f"{num_bytes:,} bytes",
            expected=f"at most {MAX_BYTES:,}",
        )
    return values


def _reducible(name: Any, value: Any, op: Reduction) -> float | int | Tensor:
    if not isinstance(name, str):
        raise InvalidSpec(
            "a value to reduce has a name that is not a string",
            seen=repr(name),
            expected="a dict with strings as keys",
        )
    if not isinstance(value, Tensor):
        plain = plain_number(name or "the value", value)
        if isinstance(plain, int | float):
            return plain
        raise InvalidSpec(
            f"{name or 'the value'} cannot be reduced over members",
            seen=type(value).__name__,
            expected="a number, a tensor, or a dict of these",
        )
    if value.layout is not torch.strided or value.dtype not in _DTYPES:
        raise InvalidSpec(
            f"{name or 'the tensor'} cannot be reduced over members",
            seen=f"a tensor of {value.layout} and {value.dtype}",
            expected=f"a dense tensor of {', '.join(map(str, _DTYPES))}",
        )
    if op in ("max", "min") and value.dtype in _COMPLEX:
        raise InvalidSpec(
            f"{name or 'the tensor'} has no {op} over members",
            seen=f"complex numbers, of {value.dtype}",
            expected="real numbers, such as tensor.abs()",
        )
    return value.to(torch.int64) if value.dtype in _COUNTS else value


def reduce(
    values: Mapping[str, float | int | Tensor],
    op: Reduction,
    group: dist.ProcessGroup,
    generation: Generation,
    part: int | None = None,
) -> dict[str, Any]:
    """Reduce the values of all members, by a collective. `part`, only for sums: of the members with
    the same `part` the first counts; None: all count. Raises InvalidSpec on all members if their
    values differ in name, shape or dtype."""
    own = {name: _outline(each) for name, each in values.items()}
    messages = [json.loads(message) for message in gather(json.dumps([part, own]).encode(), group)]
    outlines = [{name: each[0] for name, each in row.items()} for _, row in messages]
    if any(outline != outlines[0] for outline in outlines):
        barrier_after_collective(group)
        members = [entry.member_id for entry in generation.entries]
        raise InvalidSpec(
            "the members reduce different values",
            seen="; ".join(f"{m}: {o}" for m, o in zip(members, outlines, strict=True))[:1000],
            expected="the same names, and tensors of the same shape and dtype",
        )
    parts = [each[0] for each in messages]
    counts = [each is None or parts.index(each) == rank for rank, each in enumerate(parts)]
    results: dict[str, Any] = dict.fromkeys(values)
    # Members may have given the names in different orders.
    for name, value in sorted(values.items()):
        if isinstance(value, Tensor):
            results[name] = _reduced(value, op, group, counts)
        else:
            numbers = [
                row[name][1]
                for (_, row), is_counted in zip(messages, counts, strict=True)
                if is_counted
            ]
            results[name] = _OF_NUMBERS[op](numbers)
    return results


def _outline(value: float | int | Tensor) -> list[Any]:
    if isinstance(value, Tensor):
        return [f"{tuple(value.shape)} of {value.dtype}", None]
    return ["a number", value]


@torch.no_grad()
def _reduced(
    tensor: Tensor, op: Reduction, group: dist.ProcessGroup, counts: Sequence[bool]
) -> Tensor:
    """Return the reduced tensor. Half-precision types are reduced as float32 and rounded once."""
    dtype = torch.float32 if tensor.dtype in HALVES else tensor.dtype
    # Gloo adds memory, whatever its strides: members may have others.
    host = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not counts[group.rank()]:
        host.zero_()
    if op in ("sum", "mean"):
        all_reduce(host, group)
        results = host / sum(counts) if op == "mean" else host
    else:
        results = _extreme(host, op, group)
    if tensor.dtype in HALVES:
        results = results.to(tensor.dtype)
    return results.to(tensor.device)


def _extreme(host: Tensor, op: Reduction, group: dist.ProcessGroup) -> Tensor:
    """Overwrite `host` with the largest or smallest values, and NaN where any member has NaN;
    return it. Gloo itself may ignore a NaN. Collective."""
    nan = host.isnan() if host.is_floating_point() else None
    if nan is not None:
        host.masked_fill_(nan, -math.inf if op == "max" else math.inf)
    all_reduce(host, group, _EXTREMES[op])
    if nan is not None:
        any_nan = nan.to(torch.uint8)
        all_reduce(any_nan, group, dist.ReduceOp.MAX)
        host.masked_fill_(any_nan.bool(), math.nan)
    return host


def _sum(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once if all numbers are finite; a sum of integers is exact."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        # An overflow, or infinities of both signs.
        return float(sum(numbers))


def _nan_among(numbers: Sequence[float]) -> float | None:
    return math.nan if any(map(_is_nan, numbers)) else None


def _is_nan(number: float) -> bool:
    # An integer may be too large for a float.
    return isinstance(number, float) and math.isnan(number)


_OF_NUMBERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "sum": _sum,
    "mean": lambda numbers: _sum(numbers) / len(numbers),
    "max": lambda numbers: _nan_among(numbers) or max(numbers),
    "min": lambda numbers: _nan_among(numbers) or min(numbers),
}
