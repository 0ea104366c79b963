"""Options of a table: initialiser, row optimizer, admission and eviction.

The sizes of whole numbers are checked here. The coordinator checks ranges when it places the table.
"""

from dataclasses import dataclass
from typing import Protocol

from shoal_proto.numbers_given import as_index, as_number, convert_fields
from shoal_proto.v1 import tables_pb2 as pb


class RowInit(Protocol):
    """Initial values of rows, which depend only on the table's seed and name and the row's id."""

    def to_proto(self) -> pb.Initialiser: ...


class RowOptimizer(Protocol):
    """The servers' update of a row by its gradient."""

    def to_proto(self) -> pb.RowOptimizer: ...


@dataclass(frozen=True, kw_only=True)
class RowConstant:
    """Rows of which each element is `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("value",))

    def to_proto(self) -> pb.Initialiser:
        return pb.Initialiser(kind="constant", center=self.value)


@dataclass(frozen=True, kw_only=True)
class RowUniform:
    """Elements drawn uniformly between `low` and `high`."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("low", "high"))

    def to_proto(self) -> pb.Initialiser:
        center, spread = (self.low + self.high) / 2, (self.high - self.low) / 2
        return pb.Initialiser(kind="uniform", center=center, spread=spread)


@dataclass(frozen=True, kw_only=True)
class RowNormal:
    """Elements drawn almost normally: each is a sum of eight uniform numbers."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("mean", "std"))

    def to_proto(self) -> pb.Initialiser:
        return pb.Initialiser(kind="normal", center=self.mean, spread=self.std)


@dataclass(frozen=True, kw_only=True)
class RowSGD:
    """`torch.optim.SGD`, applied only to rows with a gradient, as are momentum and weight decay."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("lr", "momentum", "weight_decay"))

    def to_proto(self) -> pb.RowOptimizer:
        return pb.RowOptimizer(
            kind="sgd",
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class RowAdagrad:
    """`torch.optim.Adagrad`, applied only to rows with a gradient."""

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    rowwise: bool = False
    """True: one accumulator per row, of the mean squared gradient."""

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("lr", "eps", "initial_accumulator", "weight_decay"))

    def to_proto(self) -> pb.RowOptimizer:
        return pb.RowOptimizer(
            kind="rowwise_adagrad" if self.rowwise else "adagrad",
            lr=self.lr,
            eps=self.eps,
            initial_accumulator=self.initial_accumulator,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class RowAdam:
    """Lazy Adam: the averages of rows without a gradient do not change."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    counts_rows: bool = True
    """True: bias correction by each row's own steps. False: by the whole table's steps, as
    `torch.optim.SparseAdam` does."""

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("lr", "eps", "weight_decay"))
        object.__setattr__(self, "betas", tuple(as_number("betas", each) for each in self.betas))

    def to_proto(self) -> pb.RowOptimizer:
        return pb.RowOptimizer(
            kind="adam" if self.counts_rows else "sparse_adam",
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Condition for a pushed id to get a row; gradients of other ids are dropped."""

    min_pushes: int = 1
    """Number of pushes of an id, the last of which creates its row. Counts are estimates, and old
    pushes count less."""
    probability: float | None = None
    """Probability that an id gets a row at each push. Replaces `min_pushes`."""

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("probability",))
        min_pushes = as_index("min_pushes", self.min_pushes, least=0, most=2**31 - 1)
        object.__setattr__(self, "min_pushes", min_pushes)

    def to_proto(self) -> pb.Admission:
        if self.probability is not None:
            return pb.Admission(kind="probability", probability=self.probability)
        if self.min_pushes != 1:
            return pb.Admission(kind="count", min_pushes=self.min_pushes)
        return pb.Admission(kind="all")


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Conditions for the removal of rows. An id that is pushed again gets a new row."""

    max_idle_s: float = 0.0
    """Time without a push after which a row is removed; 0: never."""
    max_rows: int = 0
    """Limit of rows in the table, divided among its shards. 0: only `max_shard_bytes` limits the
    rows."""
    max_shard_bytes: int = 0
    """Limit of one shard's memory; 0: 1 GiB."""
    oldest_when_full: bool = True
    """True: a full shard removes the rows pushed longest ago. False: new ids get no row."""

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("max_idle_s",))
        for setting in ("max_rows", "max_shard_bytes"):
            number = as_index(setting, getattr(self, setting), least=0, most=2**63 - 1)
            object.__setattr__(self, setting, number)

    def to_proto(self) -> pb.Eviction:
        return pb.Eviction(max_idle_s=self.max_idle_s, oldest_when_full=self.oldest_when_full)
