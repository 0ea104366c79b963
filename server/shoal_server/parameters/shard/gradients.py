"""The bytes of a push as tensors, one per block, and checks of these tensors."""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_proto.errors import NonFiniteGradient, ShapeMismatch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.optimizers.tensors import compute_dtype

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# torch need not warn that gradients are not writable: they are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", module=__name__)


class BlockSplitter:
    """Splits the bytes of a push into the blocks of its shard."""

    def __init__(self, spec: Shard) -> None:
        self._spec = spec
        self._dtype = DTYPES[spec.dtype]
        self._sizes = [block.num_elements for block in spec.blocks]

    def cut(self, blocks: Sequence[int], data: Buffer) -> Sequence[Tensor]:
        """Return a view of the data for each block. Raises what `flat` raises."""
        flat = self.flat(blocks, data)
        return torch.split(flat, [self._sizes[b] for b in blocks]) if blocks else ()

    def flat(self, blocks: Sequence[int], data: Buffer) -> Tensor:
        """Return all data as one tensor, not copied. Raises ShapeMismatch if the data are not as
        long as the blocks."""
        expected_bytes = sum([self._sizes[b] for b in blocks]) * self._dtype.itemsize
        if len(data) != expected_bytes:
            raise ShapeMismatch(
                f"the gradient for shard {self._spec.shard_id} has another length",
                seen=f"{len(data)} bytes",
                expected=f"{expected_bytes} bytes of {self._spec.dtype}",
            )
        if not expected_bytes:
            return torch.empty(0, dtype=self._dtype)
        return torch.frombuffer(data, dtype=self._dtype)

    def check_finite(self, blocks: Sequence[int], data: Buffer) -> None:
        """Raise NonFiniteGradient, with the parameter's name, if an element is not finite. Raises
        what `flat` raises."""
        flat = self.flat(blocks, data)
        # A sum is far cheaper than checking each element; but finite elements may overflow.
        if not math.isfinite(flat.sum(dtype=compute_dtype(self._dtype)).item()):
            self._refuse_non_finite(blocks, self.cut(blocks, data))

    def _refuse_non_finite(self, blocks: Sequence[int], gradients: Sequence[Tensor]) -> None:
        for b, gradient in zip(blocks, gradients, strict=True):
            finite = torch.isfinite(gradient)
            if not finite.all():
                block = self._spec.blocks[b]
                at = int((~finite).nonzero()[0])
                raise NonFiniteGradient(
                    f"the gradient of parameter {block.parameter} is not finite",
                    seen=f"{gradient[at].item()} at element {block.offset + at}",
                    expected="finite numbers",
                    fix="Look for a division by zero, or lower the learning rate.",
                    details={"parameter": block.parameter},
                )
