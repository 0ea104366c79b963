"""Tensors sent from rank to rank with their shapes: the number of bytes of a description (int64),
the description in JSON, then the tensors.

Nothing is unpickled, and the size of a description is bounded.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.p2p import AbortableP2P
from shoal.state.shards import DTYPES, name_of
from shoal.torch_private.tensors import pytree
from shoal_proto.errors import InvalidSpec, MalformedMessage

MAX_DESCRIPTION_BYTES = 1024 * 1024
_PLAIN = (bool, int, float, str, type(None))


class Neighbours:
    """Ranks of one pipeline, in the order of its stages."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()
        self.p2p = AbortableP2P(group, device)

    def release(self) -> None:
        """Drop the references to the group. May be called twice."""
        self.p2p.close()
        for holder in (self, self.p2p):
            vars(holder).pop("group", None)

    def send(self, tensors: Sequence[Tensor], *, to: int, values: bool) -> None:
        """Send descriptions of the tensors to rank `to`, and their contents too if `values`."""
        described = [[name_of(t.dtype), list(t.shape), t.requires_grad] for t in tensors]
        length, text = _text(described, self.device)
        contents = [tensor.detach().contiguous() for tensor in tensors] if values else []
        for each in (length, text, *contents):
            self.p2p.exchange([(each, to)])

    def receive(self, *, source: int, values: bool) -> list[Tensor]:
        """Receive the tensors that rank `source` sends; without `values`, zeros of the same shapes.
        Raises MalformedMessage for a bad description."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.p2p.exchange([], [(length, source)])
        text = _text_buffer(length, source)
        self.p2p.exchange([], [(text, source)])
        with _reading(source):
            described = [
                (_meta(dtype, shape), bool(requires_grad))
                for dtype, shape, requires_grad in json.loads(bytes(text.tolist()))
            ]
        tensors = []
        for (dtype, shape), requires_grad in described:
            tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            if values:
                self.p2p.exchange([], [(tensor, source)])
            tensors.append(tensor.requires_grad_(requires_grad))
        return tensors

    def broadcast(self, outputs: Any, *, source: int) -> Any:
        """Send a value of rank `source` to all ranks: tensors, numbers and text, in tuples, lists
        and dicts. Raises InvalidSpec on rank `source` for anything else, and the errors of
        `receive` on the other ranks."""
        leaves: list[Any] = []
        if self.rank == source:
            leaves, spec = pytree.tree_flatten(outputs)
            length, text = _text(
                {"tree": pytree.treespec_dumps(spec), "leaves": [_described(x) for x in leaves]},
                self.device,
            )
        else:
            length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.p2p.broadcast(length, source)
        if self.rank != source:
            text = _text_buffer(length, source)
        self.p2p.broadcast(text, source)
        with _reading(source):
            description = json.loads(bytes(text.tolist()))
            spec = pytree.treespec_loads(description["tree"])
            if self.rank != source:
                leaves = [_leaf(described) for described in description["leaves"]]
            if len(leaves) != spec.num_leaves:
                raise ValueError(f"{len(leaves)} leaves, the tree has {spec.num_leaves}")
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _Meta):
                leaves[index] = torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                self.p2p.broadcast(leaves[index], source)
            elif isinstance(leaf, Tensor):
                leaves[index] = leaf.detach().contiguous()
                self.p2p.broadcast(leaves[index], source)
        return pytree.tree_unflatten(leaves, spec)


class _Meta(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def _meta(dtype: str, shape: Sequence[int]) -> _Meta:
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"the shape {shape!r:.100}")
    return _Meta(DTYPES[dtype], tuple(shape))


def _leaf(described: Any) -> Any:
    return described["value"] if "value" in described else _meta(*described["tensor"])


def _described(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, Tensor):
        return {"tensor": [name_of(leaf.dtype), list(leaf.shape)]}
    if isinstance(leaf, _PLAIN):
        return {"value": leaf}
    raise InvalidSpec(
        "the outputs of the model cannot be sent to the other stages",
        seen=type(leaf).__name__,
        expected="tensors, numbers and text in tuples, lists and dicts",
    )


@contextmanager
def _reading(source: int) -> Iterator[None]:
    try:
        yield
    # NotImplementedError: torch's, for an unknown kind of container.
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise MalformedMessage(
            f"stage {source} sent a description that cannot be read", seen=repr(error)[:200]
        ) from error


def _text(described: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    text = bytearray(json.dumps(described).encode())
    tensor = torch.frombuffer(text, dtype=torch.uint8).to(device)
    return torch.tensor([tensor.numel()], device=device), tensor


def _text_buffer(length: Tensor, source: int) -> Tensor:
    num_bytes = int(length)
    if not 0 < num_bytes <= MAX_DESCRIPTION_BYTES:
        raise MalformedMessage(
            f"stage {source} announced a description of impossible size",
            seen=f"{num_bytes} bytes",
            expected=f"1 to {MAX_DESCRIPTION_BYTES}",
        )
    return torch.zeros(num_bytes, dtype=torch.uint8, device=length.device)
