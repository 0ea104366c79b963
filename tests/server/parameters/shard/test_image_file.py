"""Image files: an image that is read equals the written one bit for bit, or is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.clusters.snapshot_world import image

from shoal_proto.errors import SnapshotDamaged
from shoal_server.parameters.shard import image_file

DATA = b"".join(image_file.pieces(image(7)))
SHA256 = image_file.digest(DATA)


def read(data: bytes, *, sha256: str = SHA256, shard_id: int = 7) -> object:
    return image_file.from_bytes(data, sha256=sha256, file="a.safetensors", shard_id=shard_id)


def test_an_image_is_read_as_it_was_written() -> None:
    written = image(7)
    back = image_file.from_bytes(DATA, sha256=SHA256, file="a", shard_id=7)
    assert (back.kind, back.shard_id, back.version, back.spec) == ("dense", 7, 3, written.spec)
    assert list(back.sessions) == list(written.sessions)
    assert back.tensors.keys() == written.tensors.keys()
    for name, tensor in written.tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor), name


@given(at=st.integers(0, 8 * len(DATA) - 1))
def test_a_flipped_bit_is_noticed(at: int) -> None:
    changed = bytearray(DATA)
    changed[at // 8] ^= 1 << at % 8
    with pytest.raises(SnapshotDamaged, match=r"a\.safetensors of shard 7") as raised:
        read(bytes(changed))
    assert raised.value.details == {"file": "a.safetensors", "shard": "7"}


@given(length=st.integers(0, len(DATA) - 1))
def test_a_short_file_is_noticed(length: int) -> None:
    with pytest.raises(SnapshotDamaged):
        read(DATA[:length])
    with pytest.raises(SnapshotDamaged):
        # Here the checksum is that of the short file.
        read(DATA[:length], sha256=image_file.digest(DATA[:length]))


def test_another_shards_file_is_refused() -> None:
    with pytest.raises(SnapshotDamaged, match="saw shard 7; expected shard 8"):
        read(DATA, shard_id=8)


def test_a_file_that_is_no_image_is_refused() -> None:
    other = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
    with pytest.raises(SnapshotDamaged):
        read(other, sha256=image_file.digest(other))
