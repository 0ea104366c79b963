"""Copies in host memory, and the memory that a CUDA runtime locks for them."""

import gc

import pytest
import torch

from shoal.state.host_copies import (
    as_bytes,
    copy_batches,
    copy_staged,
    copy_to_host,
    host_memory,
    page_locked,
)
from shoal.state.shards import StateShard, TensorShard


class Runtime:
    """The part of the CUDA runtime that locks memory."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, pointer: int, num_bytes: int, _flags: int) -> int:
        if not self._error:
            self.locked[pointer] = num_bytes
        return self._error

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0


@pytest.mark.long
def test_memory_is_locked_as_long_as_a_tensor_views_it() -> None:
    runtime = Runtime()
    memory = torch.arange(64, dtype=torch.uint8)
    pointer = memory.data_ptr()
    locked = page_locked(memory, runtime)
    assert locked is not None
    assert locked.data_ptr() == pointer
    part = locked[8:16].view(torch.int32)
    del memory, locked
    gc.collect()
    assert runtime.locked == {pointer: 64}
    assert as_bytes(part).tolist() == list(range(8, 16))
    del part
    gc.collect()
    assert runtime.locked == {}


def test_memory_that_the_runtime_refuses_to_lock_is_not_used() -> None:
    assert page_locked(torch.zeros(64, dtype=torch.uint8), Runtime(error=2)) is None


def test_a_copy_holds_what_the_source_held_when_it_was_begun() -> None:
    source, target = torch.arange(6.0).view(2, 3).T, torch.empty(3, 2)
    under_way = copy_to_host([target], [source])
    expected = source.clone()
    source.zero_()
    under_way.wait()
    assert target.equal(expected)


@pytest.mark.parametrize("batch_bytes", [1, 16, 100, 1 << 20])
def test_copies_in_batches_of_any_size_copy_every_byte(batch_bytes: int) -> None:
    sources = [
        torch.randn(7, 3).T,
        torch.arange(5, dtype=torch.int64),
        torch.empty(0),
        torch.tensor(True),
        torch.randn(33).to(torch.bfloat16),
    ]
    targets = [torch.empty(each.shape, dtype=each.dtype) for each in sources]
    copy_batches(list(zip(targets, sources, strict=True)), batch_bytes, pinned=False)
    assert all(t.equal(s) for t, s in zip(targets, sources, strict=True))


def test_staged_copies_are_complete_on_return() -> None:
    sources = [torch.randn(4), torch.randn(2, 2, requires_grad=True)]
    targets = [torch.empty(4), torch.empty(2, 2)]
    copy_staged(targets, sources)
    assert all(t.equal(s) for t, s in zip(targets, sources, strict=True))


def test_a_copied_state_has_contiguous_memory_of_its_own() -> None:
    own = torch.arange(6.0).view(2, 3).T
    state = StateShard(step=3, shards={"model.w": TensorShard.whole(own)}, values={"a": 1})
    copied = state.copied()
    own.zero_()
    tensor = copied.shards["model.w"].tensor
    assert tensor.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert tensor.is_contiguous()
    assert (copied.step, copied.values) == (3, {"a": 1})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_come_before_what_its_stream_does_next() -> None:
    source = torch.arange(1 << 22, dtype=torch.float32, device="cuda")
    memory = host_memory(source.nbytes, [source])
    assert memory.is_pinned()
    assert memory.numel() == source.nbytes
    under_way = copy_to_host([memory.view(torch.float32)], [source])
    source.zero_()
    under_way.wait()
    assert memory.view(torch.float32).equal(torch.arange(1 << 22, dtype=torch.float32))
    staged = torch.empty(1 << 22)
    copy_staged([staged], [source + 1])
    assert staged.eq(1).all()
