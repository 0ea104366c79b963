"""Shape of the mesh of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import convert_fields


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of a mesh of ranks. Ranks are numbered along `tensor` first, along `pipeline` last."""

    pipeline: int
    data: int
    """Number of copies, which take different samples."""
    tensor: int

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.pipeline, self.data, self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's (stage, copy, split)."""
        along, tensor = divmod(rank, self.tensor)
        return *divmod(along, self.data), tensor

    def __str__(self) -> str:
        return f"{self.pipeline} x {self.data} x {self.tensor} (pipeline x data x tensor)"


@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """Sizes that the user fixed."""

    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    max_rank_bytes: int | None = None
    """Limit of parameters, gradients and optimizer state on one rank."""

    def __post_init__(self) -> None:
        sizes = ("pipeline", "data", "tensor", "max_rank_bytes")
        convert_fields(self, indices=sizes)
        for name in sizes:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise InvalidSpec(f"{name} is out of range", seen=str(size), expected="at least 1")

    @property
    def product(self) -> int:
        return (self.pipeline or 1) * (self.data or 1) * (self.tensor or 1)

    @property
    def is_complete(self) -> bool:
        return None not in (self.pipeline, self.data, self.tensor)

    def __str__(self) -> str:
        given = {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}
        return " ".join(f"{name}={size}" for name, size in given.items() if size is not None)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that decide its meshes."""

    state_bytes: int
    """Size of parameters, gradients and optimizer state."""
    pipeline_sizes: frozenset[int]
    """Possible numbers of stages."""
    tensor_sizes: frozenset[int]
    """Possible numbers of ranks that split layers."""


def mesh_for(world_size: int, facts: ModelFacts, fixed: FixedSizes) -> MeshShape:
    """Choose the mesh for a world size.

    Candidates use every rank, have the fixed sizes and suit the model. The choice among them:

    1. with `max_rank_bytes`: a mesh within that limit, with the most copies; if there is none, the
       mesh that exceeds the limit least;
    2. without it: the most even mesh (8 ranks: 2 x 2 x 2);
    3. among equals: in case 1 the most even mesh, in case 2 the most copies; then the most stages.

    A size that the user fixed is used even if it does not suit the model. Raises InvalidSpec if the
    fixed sizes do not fit the world size, or leave sizes that do not suit the model.
    """
    if world_size % fixed.product or (fixed.is_complete and world_size != fixed.product):
        raise _does_not_divide(world_size, fixed)
    meshes = [mesh for mesh in _meshes(world_size) if _suits(mesh, facts, fixed)]
    if not meshes:
        raise InvalidSpec(
            f"{world_size} ranks cannot be arranged as {fixed}",
            seen=f"stages {sorted(facts.pipeline_sizes)} and tensor splits"
            f" {sorted(facts.tensor_sizes)} that suit the model",
            expected=f"pipeline x data x tensor = {world_size}",
            fix="Leave data open: it is chosen to use all ranks.",
        )
    return min(meshes, key=lambda mesh: _preference(mesh, facts, fixed.max_rank_bytes))


def _meshes(world_size: int) -> Iterator[MeshShape]:
    divisors = divisors_of(world_size)
    for pipeline in divisors:
        for tensor in divisors:
            if world_size % (pipeline * tensor) == 0:
                data = world_size // (pipeline * tensor)
                yield MeshShape(pipeline=pipeline, data=data, tensor=tensor)


def _suits(mesh: MeshShape, facts: ModelFacts, fixed: FixedSizes) -> bool:
    if fixed.data not in (None, mesh.data):
        return False
    pairs = (
        (mesh.pipeline, fixed.pipeline, facts.pipeline_sizes),
        (mesh.tensor, fixed.tensor, facts.tensor_sizes),
    )
    return all(
        size == given if given is not None else size == 1 or size in suited
        for size, given, suited in pairs
    )


def _preference(mesh: MeshShape, facts: ModelFacts, max_rank_bytes: int | None) -> tuple[int, ...]:
    evenness = sorted(mesh.sizes, reverse=True)
    if max_rank_bytes is None:
        return (*evenness, -mesh.data, -mesh.pipeline)
    rank_bytes = -(-facts.state_bytes // (mesh.pipeline * mesh.tensor))
    over = max(0, rank_bytes - max_rank_bytes)
    return (over, -mesh.data, *evenness, -mesh.pipeline)


def _does_not_divide(world_size: int, fixed: FixedSizes) -> InvalidSpec:
    product = fixed.product
    fitting = (
        f"{product} ranks"
        if fixed.is_complete
        else f"{product}, {2 * product}, {3 * product} or another multiple of {product} ranks"
    )
    return InvalidSpec(
        f"{world_size} ranks cannot be arranged as {fixed}",
        seen=f"world size {world_size} and {fixed}, together {product}",
        expected=fitting,
        fix="Change the number of members, or leave one of the sizes open.",
    )


def divisors_of(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
