"""All members' rows of a batch, gathered in the batch's order, with exact gradients.

Losses are weighted by shares before backward, and gradients averaged after it. So two kinds of loss
have the gradients of one process: a loss over all rows, the same on every member; and a mean over
the member's own rows, each compared with all rows.

Members first exchange descriptions of a call. Descriptions, and rows on the host, are messages with
their own tags, so that no message is mixed up with one of another collective. Rows on a GPU are
sent by a collective, once the descriptions agree.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from shoal.backends.abortable.gather import barrier_after_collective, record_of_json
from shoal.backends.abortable.p2p import AbortableP2P
from shoal.backends.process_group.transports import is_gloo
from shoal.model.gradients import is_on_host
from shoal.state.host_copies import as_bytes
from shoal.state.shards import outline_of
from shoal.torch_private.compiling import eager
from shoal_proto.errors import InvalidSpec

CALL, OWN_CALL = "session.gather", "torch.distributed.all_gather"
MAX_DIMS = 16
MAX_SEEN_CHARS = 1000
UNKNOWN = -1
"""Value of `num_samples` for a script's own batches."""
_MESSAGE_BYTES = 1024
_TAGS_PER_CALL, _NUM_CALLS, _CALLS_PER_STEP = 3, 8000, 64
"""Limits that keep tags below 32767, which every MPI allows."""
_MESSAGE, _ROWS, _GRADIENTS = 1, 2, 3
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Share:
    """A member's share of a global batch."""

    index: int
    """The same on members with the same samples."""
    num_samples: int
    """`UNKNOWN` if the script makes its batches."""


@dataclass(frozen=True, kw_only=True)
class _CallMessage:
    """Description of a call. Sent as JSON, padded with spaces to `_MESSAGE_BYTES`."""

    call: str
    index: int
    num_samples: int
    rows: int
    of: str
    """Shape of a row, and dtype."""
    trains: bool
    outputs: int = 0
    """Checksum of the outputs' shapes and dtypes, in a call of torch's all-gather."""


class RowGathers:
    """Gathers of one member in one step. Used by one thread at a time: trainer's or autograd's."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[str],
        share: Share,
        step: int,
        waits: Callable[[str], AbstractContextManager[None]],
        *,
        by_messages: bool | None = None,
    ) -> None:
        """`members`: names by rank. `step`: number of committed steps. `waits(what)`: context of a
        wait for others.

        `by_messages`: send rows from rank to rank over the host, not by a collective; must be the
        same on all members. None: send only rows on the host so, and all rows of a Gloo group.
        """
        self._by_messages = True if by_messages is None and is_gloo(group) else by_messages
        self._p2p: AbortableP2P | None = AbortableP2P(group, torch.device("cpu"))
        self._rank = group.rank()
        self._members = members
        self._share = share
        self._first = step * _CALLS_PER_STEP
        self._num_calls = 0
        self._waits = waits

    @eager
    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all members. Collective.

        Raises InvalidSpec if `tensor` is not a dense tensor with rows, and on all members if their
        rows do not fit together.
        """
        _check(tensor)
        trains = tensor.requires_grad and torch.is_grad_enabled()
        messages = self._meet(
            call=CALL,
            rows=len(tensor),
            of=f"{tuple(tensor.shape[1:])} of {tensor.dtype}",
            trains=trains,
        )
        self._check_rows(messages)
        routes = _RowRoutes(self, messages, self._rank, self._num_calls)
        gathered: Tensor = _Gather.apply(tensor, routes)  # type: ignore[no-untyped-call]
        return gathered

    def check_own(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Check a call of torch's own all-gather before it is made. Raises InvalidSpec on all
        members if a rank's outputs do not fit the tensors that will be sent."""
        messages = self._meet(
            call=OWN_CALL,
            rows=len(tensor) if tensor.ndim else 1,
            of=_outline(tensor),
            trains=False,
            outputs=_checksum(map(_outline, outputs)),
        )
        self._check_calls(messages)
        expected = _checksum(message.of for message in messages)
        if any(message.outputs != expected for message in messages):
            raise self._refusal(
                f"{OWN_CALL} of tensors whose sizes differ between members, in a step with"
                " unequal shares",
                messages,
                expected="session.gather(tensor), which takes unequal shares, instead of"
                " torch.distributed.all_gather, torch.distributed.nn.all_gather or a GatherLayer",
                fix="Or use a global_batch_size that every number of members divides, with"
                " drop_last=True. See docs/contrastive.md.",
            )

    def close(self) -> None:
        """End the step: later gradients raise."""
        p2p, self._p2p = self._p2p, None
        if p2p is not None:
            p2p.close()

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        call: int,
        kind: int,
        *,
        by_messages: bool,
    ) -> None:
        """Send contiguous tensors to the given ranks, and receive from them. Raises InvalidSpec
        after `close`."""
        p2p = self._p2p
        if p2p is None:
            raise InvalidSpec(
                f"gradients reached {CALL} after the step in which it was called",
                expected="session.backward in the same step",
            )
        what = f"the gradients of {CALL}" if kind == _GRADIENTS else CALL
        if not sends and not receives:
            return
        tag = (self._first + call) % _NUM_CALLS * _TAGS_PER_CALL + kind
        with self._waits(f"{what}, call {call} of step {self._first // _CALLS_PER_STEP}"):
            if by_messages:
                p2p.begin(_in_bytes(sends), _in_bytes(receives), tag).wait()
            else:
                _all_to_all(sends, receives, p2p.group)

    def uses_host_messages(self, rows: Tensor) -> bool:
        """True if these rows are sent over the host."""
        return is_on_host(rows) if self._by_messages is None else self._by_messages

    def _meet(self, **fields: Any) -> list[_CallMessage]:
        self._num_calls += 1
        own = _CallMessage(index=self._share.index, num_samples=self._share.num_samples, **fields)
        messages = [_packed(own) for _ in self._members]
        others = [rank for rank in range(len(messages)) if rank != self._rank]
        sends = [(messages[self._rank], rank) for rank in others]
        receives = [(messages[rank], rank) for rank in others]
        self.exchange(sends, receives, self._num_calls, _MESSAGE, by_messages=True)
        return [_unpacked(message) for message in messages]

    def _check_calls(self, messages: Sequence[_CallMessage]) -> None:
        if len({message.call for message in messages}) > 1:
            raise self._refusal(
                "the members gather rows by different calls in a step",
                messages,
                expected="the same calls in the same order on every member",
            )

    def _check_rows(self, messages: Sequence[_CallMessage]) -> None:
        self._check_calls(messages)
        if len({(message.of, message.trains) for message in messages}) > 1:
            raise self._refusal(
                f"the members gather different rows in call {self._num_calls} of {CALL} in a step",
                messages,
                expected="rows of the same shape and dtype on every member, with gradients on all"
                " members or on none",
            )
        if any(m.rows != max(m.num_samples, 1) for m in messages if m.num_samples >= 0):
            raise self._refusal(
                f"{CALL} of a tensor with more or fewer rows than the member's share has samples",
                messages,
                expected="as many rows as the share has samples, in their order (one if it has no"
                " samples)",
                fix="If each sample has several views, gather each view by itself, or make samples"
                " the first dimension. If the script cuts its batches itself, see"
                " docs/contrastive.md.",
            )
        if len({message.rows for message in messages if message.num_samples == UNKNOWN}) > 1:
            raise self._refusal(
                f"{CALL} of unequal numbers of rows in a step without a batch of session.batches",
                messages,
                expected="the same number of rows on every member: their losses have equal weights",
                fix="Use session.batches, which weights each member's loss by its share.",
            )

    def _refusal(
        self, what: str, messages: Sequence[_CallMessage], *, expected: str, fix: str = ""
    ) -> InvalidSpec:
        """Return the error of a call, the same on all members. Collective."""
        if self._p2p is not None:
            barrier_after_collective(self._p2p.group)
        by_member = zip(self._members, messages, strict=True)
        seen = "; ".join(f"{name}: {_description(message)}" for name, message in by_member)
        return InvalidSpec(what, seen=seen[:MAX_SEEN_CHARS], expected=expected, fix=fix)


class _RowRoutes:
    def __init__(
        self, gathers: RowGathers, messages: Sequence[_CallMessage], rank: int, num_calls: int
    ) -> None:
        self._gathers = gathers
        self._call = num_calls
        by_index: dict[int, list[int]] = {}
        for each, message in enumerate(messages):
            by_index.setdefault(message.index, []).append(each)
        # The n-th rank of each share exchanges rows with the n-th ranks of the other shares, so all
        # ranks of a share send and receive the same.
        column = by_index[messages[rank].index].index(rank)
        self._ranks = [ranks[column] for _, ranks in sorted(by_index.items())]
        self._index = self._ranks.index(rank)
        own = [messages[each] for each in self._ranks]
        self._counts = [
            each.rows if each.num_samples == UNKNOWN else each.num_samples for each in own
        ]
        self._others = [index for index, each in enumerate(self._ranks) if each != rank]

    def gathered(self, rows: Tensor) -> Tensor:
        own = self._placed(rows)[: self._counts[self._index]]
        whole = own.new_empty((sum(self._counts), *own.shape[1:]))
        parts = torch.split(whole, self._counts)
        parts[self._index].copy_(own)
        sends = [(own, self._ranks[index]) for index in self._others]
        self._exchange(sends, parts, _ROWS, rows)
        return whole.to(rows.device)

    def scattered(self, gradient: Tensor, num_rows: int) -> Tensor:
        parts = torch.split(self._placed(gradient), self._counts)
        own = parts[self._index]
        received = [own if index == self._index else torch.empty_like(own) for index in self._all()]
        sends = [(parts[index], self._ranks[index]) for index in self._others]
        self._exchange(sends, received, _GRADIENTS, gradient)
        # Added in the same order on every rank, and rounded to half precision once.
        wide = torch.float32 if own.dtype in _HALVES else own.dtype
        total = own.new_zeros((num_rows, *own.shape[1:]), dtype=wide)
        for each in received:
            total[: len(own)] += each.to(wide)
        summed: Tensor = total.to(gradient.dtype).to(gradient.device)
        return summed

    def _placed(self, rows: Tensor) -> Tensor:
        device = torch.device("cpu") if self._gathers.uses_host_messages(rows) else rows.device
        return rows.detach().to(device).resolve_conj().resolve_neg().contiguous()

    def _all(self) -> range:
        return range(len(self._ranks))

    def _exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        buffers: Sequence[Tensor],
        kind: int,
        rows: Tensor,
    ) -> None:
        receives = [(buffers[index], self._ranks[index]) for index in self._others]
        is_by_messages = self._gathers.uses_host_messages(rows)
        self._gathers.exchange(sends, receives, self._call, kind, by_messages=is_by_messages)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, routes: _RowRoutes) -> Tensor:
        context.routes, context.num_rows = routes, len(rows)
        return routes.gathered(rows)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.routes.scattered(gradient, context.num_rows), None


def is_gather(node: Node) -> bool:
    """True if this autograd node sends gradients of rows to their owners."""
    return getattr(node, "_forward_cls", None) is _Gather


def _check(tensor: object) -> None:
    seen = ""
    if not isinstance(tensor, Tensor):
        seen = type(tensor).__name__
    elif isinstance(tensor, DTensor):
        seen = "a DTensor, of which each member has a part"
    elif tensor.layout is not torch.strided or not 1 <= tensor.ndim <= MAX_DIMS:
        seen = f"a tensor of {tensor.layout} and shape {tuple(tensor.shape)}"
    if seen:
        raise InvalidSpec(
            f"{CALL} of something without rows",
            seen=seen,
            expected=f"a dense tensor of 1 to {MAX_DIMS} dimensions, the first of them the samples",
        )


def _outline(tensor: Tensor) -> str:
    return outline_of(tensor)[: _MESSAGE_BYTES // 4]


def _description(message: _CallMessage) -> str:
    if message.call == OWN_CALL:
        return f"{message.call} of {message.of}"
    share = "" if message.num_samples == UNKNOWN else f" for {message.num_samples} samples"
    gradients = "with" if message.trains else "without"
    return f"{message.rows} rows{share}, each {message.of}, {gradients} gradients"


def _checksum(texts: Iterable[str]) -> int:
    return zlib.crc32("; ".join(texts).encode())


def _packed(message: _CallMessage) -> Tensor:
    encoded = json.dumps(asdict(message)).encode()
    return torch.frombuffer(bytearray(encoded.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)


def _unpacked(message: Tensor) -> _CallMessage:
    return record_of_json(_CallMessage, message.numpy().tobytes())


def _in_bytes(tensors: Sequence[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    return [(as_bytes(each), rank) for each, rank in tensors if each.numel()]


def _all_to_all(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    group: dist.ProcessGroup,
) -> None:
    empty = receives[0][0].new_empty(0, dtype=torch.uint8)
    sent, received = [empty] * group.size(), [empty] * group.size()
    for tensors, by_rank in ((sends, sent), (receives, received)):
        for each, rank in _in_bytes(tensors):
            by_rank[rank] = each
    # Gloo refuses lists of different sizes, and accepts split sizes of one tensor.
    sizes = [part.numel() for part in received]
    together = empty.new_empty(sum(sizes))
    sent_sizes = [part.numel() for part in sent]
    dist.all_to_all_single(together, torch.cat(sent), sizes, sent_sizes, group=group)
    with torch.no_grad():
        for part, piece in zip(received, torch.split(together, sizes), strict=True):
            part.copy_(piece)
