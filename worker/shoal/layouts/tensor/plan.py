"""Plan of how each module is split over a tensor-parallel group, with the reasons."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal_proto.errors import InvalidSpec

COLUMN = "column"
"""Split by outputs: nn.Linear by rows of its weight, nn.Embedding by columns."""
ROW = "row"
"""Split by inputs: nn.Linear by columns of its weight."""
VOCAB = "vocab"
HEADS = "heads"
WHOLE = "whole"
"""Not split: every rank holds and computes the whole."""
MASK = "mask"
"""Split of a dropout within a pair: each rank uses its part of the mask."""


def part_sizes(size: int, degree: int) -> tuple[int, ...]:
    """Cut `size` elements over the ranks as torch.chunk and DTensor do."""
    chunk = -(-size // degree)
    return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(degree))


@dataclass(frozen=True, kw_only=True)
class ParameterSplit:
    """Split of one parameter over the ranks."""

    shape: tuple[int, ...]
    dim: int | None
    """Dimension that is cut; None: whole on every rank."""
    element_bytes: int

    def shape_on(self, rank: int, degree: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        own = part_sizes(self.shape[self.dim], degree)[rank]
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :])

    def bytes_on(self, rank: int, degree: int) -> int:
        count = self.element_bytes
        for size in self.shape_on(rank, degree):
            count *= size
        return count


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """Entry of a plan for one module."""

    module: str
    style: str
    paired: bool = False
    """True for a column and the row that takes the column's outputs without a gather."""
    why: str
    parts: Mapping[str, ParameterSplit]
    """Splits by the parameter's name in the module; without parameters of an earlier entry."""
    width: int = 0

    def bytes_on(self, rank: int, degree: int) -> int:
        return sum(part.bytes_on(rank, degree) for part in self.parts.values())

    def shapes(self, degree: int) -> str:
        """Return the first parameter's shape on each rank, for a table; once if all are equal."""
        if not self.parts:
            return "-"
        main = next(iter(self.parts.values()))
        shown = ["x".join(map(str, main.shape_on(rank, degree))) or "1" for rank in range(degree)]
        return shown[0] if len(set(shown)) == 1 else " ".join(shown)


class SequenceRole(StrEnum):
    """Role of a module in a block in which each rank computes its positions of a sequence."""

    BLOCK = "block"
    """Takes and returns whole values; inside, the positions of its inputs are spread over ranks."""
    NORM = "norm"
    """Computes this rank's positions: the gradients of its parameters are summed over ranks."""
    DROPOUT = "dropout"
    COLUMN = "column"
    """Gathers the positions of its input."""
    ROW = "row"
    """Sums its output over ranks and keeps this rank's positions. Its bias' gradient is summed over
    ranks."""
    AROUND = "around"
    """Takes all positions; the positions of its output are spread over ranks."""


_SHOWN: Mapping[SequenceRole, str] = {
    SequenceRole.NORM: "norms",
    SequenceRole.DROPOUT: "dropouts",
    SequenceRole.COLUMN: "gather",
    SequenceRole.ROW: "scatter",
    SequenceRole.AROUND: "take all positions",
}


@dataclass(frozen=True, kw_only=True)
class SequenceEntry:
    """Entry for one module of a block in which each rank computes its positions."""

    module: str
    role: SequenceRole
    block: str
    takes: tuple[int | str, ...] = (0,)
    """Index or name of each argument with positions that are spread."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Plan that splits a model over `degree` ranks. `str()` returns a table."""

    degree: int
    entries: tuple[PlanEntry, ...]
    """Modules with parameters of their own, and dropouts within pairs. Split attention contains its
    `out_proj`."""
    sequence: tuple[SequenceEntry, ...] = ()
    """Modules of blocks in which each rank computes only its positions; each block precedes its
    modules."""

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of all parameters, without buffers, by rank."""
        return tuple(
            sum(entry.bytes_on(rank, self.degree) for entry in self.entries)
            for rank in range(self.degree)
        )

    @property
    def whole_bytes(self) -> int:
        """Size of all parameters in one process."""
        return sum(entry.bytes_on(0, 1) for entry in self.entries)

    @property
    def splits(self) -> bool:
        """True if any parameter is cut."""
        return any(part.dim is not None for entry in self.entries for part in entry.parts.values())

    def entry(self, module: str) -> PlanEntry:
        for entry in self.entries:
            if entry.module == module:
                return entry
        raise InvalidSpec(
            "the plan has no such module",
            seen=repr(module),
            expected=", ".join(entry.module for entry in self.entries),
        )

    def __str__(self) -> str:
        rows = [("module", "style", "shape per rank", "bytes per rank", "why")]
        rows += [self._row(entry) for entry in self.entries]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)])
            + f"  {row[4]}"
            for row in rows
        ]
        per_rank = " ".join(map(str, self.bytes_per_rank))
        head = f"tensor parallel over {self.degree} ranks: of {self.whole_bytes} bytes of"
        head += f" parameters the ranks hold {per_rank}"
        if not self.splits and self.degree > 1:
            head += "\nnothing is split: every rank holds and computes everything"
        return "\n".join([head, *lines, *self._blocks()])

    def _blocks(self) -> Iterator[str]:
        for block in dict.fromkeys(entry.block for entry in self.sequence):
            roles = Counter(e.role for e in self.sequence if e.block == block)
            counts = (f"{roles[r]} {n}" for r, n in _SHOWN.items() if roles[r])
            yield f"{block or '(the model)'}: each rank computes its positions: {', '.join(counts)}"

    def _row(self, entry: PlanEntry) -> tuple[str, str, str, str, str]:
        counts = [entry.bytes_on(rank, self.degree) for rank in range(self.degree)]
        shown = str(counts[0]) if len(set(counts)) == 1 else " ".join(map(str, counts))
        name = entry.module or "(the model)"
        return name, entry.style, entry.shapes(self.degree), shown, entry.why
