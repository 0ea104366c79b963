"""What members do together between two steps, carried over the loss of one of them."""

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.last_word import let_all_hear
from shoal.backends.abortable.waiter import wait_abortable
from shoal.membership.generation import Generation
from shoal.membership.step_messages import refuse_earlier
from shoal.session.elastic_controller import ElasticController
from shoal.state.resharding import gather
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import GenerationBroken, InvalidSpec, JobFinished

T = TypeVar("T")
Value = float | int | Tensor | Mapping[str, float | int | Tensor]
"""A number, a tensor, or several by name."""
Reduction = Literal["sum", "mean", "max", "min"]
MAX_BYTES = 1 << 30
"""Of what is reduced in one call: state has other ways."""
MAX_REASON_CHARS = 200
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
)
"""Of tensors, that members can reduce."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_OF_NUMBERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "sum": lambda numbers: sum(numbers) if _whole(numbers) else math.fsum(numbers),
    "mean": lambda numbers: math.fsum(numbers) / len(numbers),
    "max": max,
    "min": min,
}


class SharedCalls:
    """Of one session. Each call returns once all members have its result."""

    def __init__(self, controller: ElasticController, fields: dict[str, str]) -> None:
        """`fields` are the proposal's."""
        self._controller = controller
        self._fields = fields

    def run(self, call: str, attempt: Callable[[Generation, dist.ProcessGroup], T]) -> T:
        """What `attempt` returns in a generation in which no member is lost meanwhile.

        `call` says what this is: all members must make the same one.
        """
        strategy = self._strategy(call)
        position = strategy.position
        refuse_earlier(position.form, call)
        self._controller.call.check_end(call, strategy.step)
        # Until it returns nobody is taken in whose script would be elsewhere.
        self._controller.call.is_under_way = True
        try:
            if position.unconfirmed:
                # A member was lost with the last one: whether all have its result is not known.
                self._recover(GenerationBroken("a member was lost after a call between two steps"))
                self._controller.stand(self._fields)
            position.in_call = True
            while True:
                generation = self._controller.stand(self._fields)
                self._controller.call.check_end(call, strategy.step)
                group = strategy.group
                refuse_earlier(position.form, call)
                position.stands(call, is_call=True)
                try:
                    self._check_call(call, generation, group)
                    result = attempt(generation, group)
                except Exception as error:  # noqa: BLE001 - raised again, unless a peer was lost
                    self._recover_in(call, error)
                else:
                    position.returns(confirmed=self._confirm(group))
                    return result
        finally:
            self._controller.call.is_under_way = position.in_call = False
            position.stands("")

    def _confirm(self, group: dist.ProcessGroup) -> bool:
        """Whether it is certain that all members have come so far."""
        try:
            wait_abortable(dist.all_reduce(torch.zeros(1), group=group, async_op=True), group)
        except RuntimeError as error:
            if not self._controller.is_break(error):
                raise
            return False
        return True

    def all_reduce(self, value: Value, op: Reduction) -> Any:
        """See `Session.all_reduce`."""
        if op not in _OF_NUMBERS:
            raise InvalidSpec("op is unknown", seen=op, expected=str([*_OF_NUMBERS]))
        values = named(value)

        def attempt(generation: Generation, group: dist.ProcessGroup) -> dict[str, Any]:
            return reduce(values, op, group, generation)

        found = self.run("session.all_reduce", attempt)
        return found if isinstance(value, Mapping) else found[""]

    def _recover(self, error: Exception) -> None:
        if not self._controller.is_break(error):
            raise error
        # The frames below hold the wrapped model and with it the group that is to go.
        traceback.clear_frames(error.__traceback__)
        self._controller.recover(error)

    def _recover_in(self, call: str, error: Exception) -> None:
        try:
            self._recover(error)
        except JobFinished as finished:
            raise InvalidSpec(
                f"{call} was made by this member alone",
                seen="the other members have left the session, and with them the job is finished",
                expected=f"{call} on every member, within the session",
            ) from finished

    def _strategy(self, call: str) -> SynchronousStrategy:
        strategy = self._controller.strategy
        if not isinstance(strategy, SynchronousStrategy):
            raise InvalidSpec(
                f"{call} needs members that take their steps together",
                seen=f"strategy {strategy.name}",
                expected="a synchronous strategy; under others each member does it alone",
            )
        if not self._controller.call.may_be_made:
            raise InvalidSpec(
                f"{call} before the first batch",
                seen="no batch that this member's script has asked for",
                expected="the call after a step: members that join later come in there",
            )
        return strategy

    def _check_call(self, call: str, generation: Generation, group: dist.ProcessGroup) -> None:
        calls = [word.decode() for word in gather(call.encode(), group)]
        if len(set(calls)) > 1:
            let_all_hear(group)
            names = [entry.member_id for entry in generation.entries]
            raise InvalidSpec(
                "the members do different things between two steps",
                seen="; ".join(f"{name}: {word}" for name, word in zip(names, calls, strict=True)),
                expected="the same calls in the same order on every member",
            )


def stop(controller: ElasticController, reason: str, *, has_batches: bool, in_step: bool) -> None:
    """See `Session.stop`."""
    strategy = controller.strategy
    if not isinstance(strategy, SynchronousStrategy) or not has_batches:
        raise InvalidSpec(
            "session.stop where no batches are taken together",
            seen=f"strategy {strategy.name}",
            expected="session.batches of a synchronous strategy; otherwise `shoal stop JOB`",
        )
    refuse_earlier(strategy.position.form, "session.stop")
    strategy.position.stop(strategy.step + int(in_step), reason[:MAX_REASON_CHARS])


def present(
    controller: ElasticController, fields: dict[str, str], *, has_batches: bool
) -> Generation:
    """The generation that rank and world size are of, formed if there is none yet."""
    if controller.generation is not None:
        return controller.generation
    if not has_batches:
        raise InvalidSpec(
            "there is no generation yet",
            expected="to ask for rank and world size after session.batches(...), or from"
            " the first step on",
        )
    return controller.stand(fields)


def note_loss(error: BaseException, controller: ElasticController) -> None:
    """Where a script ends with a loss that it met by itself, between steps, say what to do."""
    if controller.is_break(error):
        error.add_note(
            "A member was lost in a collective call that the script makes between two steps. "
            "In session.evaluate, session.all_reduce and session.state_dict such a call begins "
            "again with the members that are left."
        )


def named(value: Value) -> dict[str, float | int | Tensor]:
    """The values by name; one alone has none. Raises InvalidSpec for what cannot be reduced."""
    values = dict(value) if isinstance(value, Mapping) else {"": value}
    num_bytes = 0
    for name, each in values.items():
        if not isinstance(name, str):
            raise InvalidSpec(
                "values are reduced by name",
                seen=repr(name),
                expected="a dict with strings as keys",
            )
        if not isinstance(each, int | float | Tensor):
            raise InvalidSpec(
                f"{name or 'the value'} cannot be reduced over members",
                seen=type(each).__name__,
                expected="a number, a tensor, or a dict of these",
            )
        if isinstance(each, Tensor) and not (
            each.layout is torch.strided and each.dtype in _DTYPES
        ):
            raise InvalidSpec(
                f"{name or 'the tensor'} cannot be reduced over members",
                seen=f"a tensor of {each.layout} and {each.dtype}",
                expected=f"a dense tensor of {', '.join(map(str, _DTYPES))}",
            )
        num_bytes += each.nbytes if isinstance(each, Tensor) else 8
    if num_bytes > MAX_BYTES:
        raise InvalidSpec(
            "too much to be reduced in one call",
            seen=f"{num_bytes:,} bytes",
            expected=f"at most {MAX_BYTES:,}",
        )
    # The sum of True and True is 2, as that of numbers is.
    return {name: _counted(each) for name, each in values.items()}


def _counted(value: float | int | Tensor) -> float | int | Tensor:
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return value.to(torch.int64)
    return value


def reduce(
    values: Mapping[str, float | int | Tensor],
    op: Reduction,
    group: dist.ProcessGroup,
    generation: Generation,
    part: int | None = None,
) -> dict[str, Any]:
    """Collective: the values of all members in one. Of members with the same `part` the first one
    counts; `None`: all count.

    Raises InvalidSpec, on all members, if they do not have values of the same names and shapes.
    """
    own = {name: _told(each) for name, each in values.items()}
    told = [json.loads(word) for word in gather(json.dumps([part, own]).encode(), group)]
    outlines = [{name: each[0] for name, each in said.items()} for _, said in told]
    if any(outline != outlines[0] for outline in outlines):
        let_all_hear(group)
        members = [entry.member_id for entry in generation.entries]
        raise InvalidSpec(
            "the members reduce different values",
            seen="; ".join(f"{m}: {o}" for m, o in zip(members, outlines, strict=True))[:1000],
            expected="the same names, and tensors of the same shape and dtype",
        )
    parts = [each[0] for each in told]
    counts = [each is None or parts.index(each) == rank for rank, each in enumerate(parts)]
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = _reduced(value, op, group, counts)
        else:
            numbers = [said[name][1] for (_, said), own in zip(told, counts, strict=True) if own]
            found[name] = _OF_NUMBERS[op](numbers)
    return found


def _told(value: float | int | Tensor) -> list[Any]:
    if isinstance(value, Tensor):
        return [f"{tuple(value.shape)} of {value.dtype}", None]
    return ["a number", value]


@torch.no_grad()
def _reduced(
    tensor: Tensor, op: Reduction, group: dist.ProcessGroup, counts: Sequence[bool]
) -> Tensor:
    host = tensor.detach().to("cpu", copy=True)
    if not counts[group.rank()]:
        host.zero_()
    torch_op = _OPS["sum" if op == "mean" else op]
    wait_abortable(dist.all_reduce(host, op=torch_op, group=group, async_op=True), group)
    return (host / sum(counts) if op == "mean" else host).to(tensor.device)


def _whole(numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)
