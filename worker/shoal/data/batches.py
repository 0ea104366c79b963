"""Which samples a step trains on, and which of them are this member's.

The order of samples is a function of seed and epoch alone and the position in it is the committed
step, so who is there decides only who computes what: with any number of members, changing at any
time, each sample counts exactly once an epoch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shoal.data.loading import BatchLoader, Loading, Span
from shoal.data.parts import of_step
from shoal.data.permutation import KeyedPermutation
from shoal.data.samples import Collate, MapDataset, Samples
from shoal.data.shards import Shards
from shoal_proto.errors import InvalidSpec, SampleFailed
from shoal_proto.numbers_given import as_index

LARGEST_KEPT_ORDER = 1 << 20
"""Of more samples no array of all indices is made."""
MAX_SAMPLES_NAMED = 8
"""Of a batch that could not be made."""
MAX_COLUMNS_IN_LIST = 8
"""A longer list of tensors is one of samples."""
BLOCK = 8192
"""So many indices are computed at a time then."""

Dataset = MapDataset | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One member's part of one step. `inputs, targets = batch` unpacks it; `batch["x"]` is a
    part of samples that are dicts."""

    inputs: Any
    """All parts of a sample but the last, a tuple where they are several; the whole of one that is
    no tuple, such as a dict."""
    targets: Any
    """The last part. None if the dataset has one part only."""
    indices: list[int]
    """The dataset's indices of these samples; empty if this member has no part in the step: see
    `is_stand_in`."""
    weight: float
    """The member's share of the global batch times the number of shares."""
    step: int
    """Optimizer steps before this one."""
    epoch: int
    first: int = 0
    """Position in the global batch of the first of these samples."""

    @property
    def num_samples(self) -> int:
        """How many samples of the step are in this batch: what a script counts by. 0 if it is a
        stand-in."""
        return len(self.indices)

    @property
    def is_stand_in(self) -> bool:
        """True if this member, or this part, has no samples of the step: there are fewer than
        members, or fewer in the share than parts.

        `inputs` and `targets` then hold another's sample once more, the first of the step, or of
        the share: forward passes need one where members compute together. It has weight 0.
        """
        return not self.indices

    def __iter__(self) -> Iterator[Any]:
        yield self.inputs
        yield self.targets

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.inputs, Mapping):
            raise InvalidSpec(
                "a batch whose samples are no dicts has no names",
                seen=f"batch[{name!r}] of {type(self.inputs).__name__}",
                expected="batch.inputs and batch.targets",
            )
        return self.inputs[name]

    def parts(self, num_parts: int) -> Iterator["Batch"]:
        """This batch as so many micro-batches, on every member as many:

            with session.step():
                for part in batch.parts(4):
                    session.backward(loss_fn(model(part.inputs), part.targets))

        Each part's loss is the mean over its samples; the session weights it, so that gradients
        are those of the whole global batch. They are reduced once, in the last part. Parts differ
        by one sample at most; where a share has fewer samples than there are parts, some parts are
        empty: they hold one sample all the same, which gets weight 0.

        Raises InvalidSpec outside a step, for fewer than one part or more than a global batch
        has samples, and where a part has no backward pass or more than one.
        """
        return of_step().parts(self, num_parts)


@dataclass(frozen=True)
class Position:
    """Where in the samples of a job a step begins."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    """Position in the epoch's order."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which samples are trained on. Pure: the same on every member."""

    num_samples: int
    global_batch_size: int
    num_epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """Leave out the samples at an epoch's end that do not fill a batch; with shuffling these are
    others in each epoch."""
    origin: Position = Position()
    """Where the first step with batches of this size begins: the steps before were of another."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "num_epochs", "seed"):
            said = "epochs" if name == "num_epochs" else name
            value = as_index(said, getattr(self, name))
            object.__setattr__(self, name, value)
            if name == "num_samples" and value < 1:
                raise InvalidSpec("the dataset has no samples", expected="at least one")
            if name != "seed" and value < 1:
                raise InvalidSpec(f"{said} is out of range", seen=str(value), expected="at least 1")
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise InvalidSpec(
                "drop_last leaves out every sample",
                seen=f"{self.num_samples} samples, global_batch_size={self.global_batch_size}",
                expected="at least one whole batch in an epoch",
            )

    @cached_property
    def rule(self) -> int:
        """Number of the rule by which seed and epoch give an order. 1: torch's permutation, as
        an array. 2, of more samples than that: a keyed permutation."""
        return 2 if self.shuffle and self.num_samples > LARGEST_KEPT_ORDER else 1

    @property
    def name(self) -> str:
        """Of the order, as checkpoints and members tell it."""
        return str(self.rule)

    @cached_property
    def steps_per_epoch(self) -> int:
        """The last one is smaller if the batch size does not divide; with `drop_last` it is left
        out."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @cached_property
    def num_steps(self) -> int:
        """Of the whole job."""
        whole_epochs = self.num_epochs - self.origin.epoch - 1
        if whole_epochs < 0:
            return self.origin.step
        return self.origin.step + self._first_steps + whole_epochs * self.steps_per_epoch

    @cached_property
    def _first_steps(self) -> int:
        """Steps in what is left of the origin's epoch."""
        left = max(self.num_samples - self.origin.offset, 0)
        whole, rest = divmod(left, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def position(self, step: int) -> Position:
        """Where that step begins; of the last one of an epoch it is known where the next begins."""
        since = step - self.origin.step
        if since < 0:
            raise InvalidSpec(
                "a step from before the batch size was changed",
                seen=f"step {step}",
                expected=f"step {self.origin.step} or later",
            )
        if since < self._first_steps:
            offset = self.origin.offset + since * self.global_batch_size
            return Position(step, self.origin.epoch, offset)
        further, place = divmod(since - self._first_steps, self.steps_per_epoch)
        return Position(step, self.origin.epoch + 1 + further, place * self.global_batch_size)

    def span(self, step: int) -> tuple[int, int, int]:
        """(epoch, start, stop): the positions of the step's global batch in its epoch's order."""
        begins = self.position(step)
        stop = min(begins.offset + self.global_batch_size, self.num_samples)
        return begins.epoch, begins.offset, stop

    def epoch_order(self, epoch: int) -> Tensor:
        """Sample index by position, for a whole epoch."""
        return self.indices(epoch, 0, self.num_samples)

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """The indices of the samples at the positions [start, stop) of an epoch's order."""
        if not self.shuffle:
            return torch.arange(start, stop)
        if self.rule == 1:
            # A quarter of the time of a slice.
            order = _permutation(self.num_samples, self.seed, epoch)
            return order.narrow(0, start, stop - start)
        key = _mix(self.seed, epoch)
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        parts = [_block(self.num_samples, key, block) for block in blocks]
        first = blocks.start * BLOCK
        return torch.cat(parts)[start - first : stop - first] if parts else torch.arange(0)


@lru_cache(maxsize=8)
def _permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Some are kept: at the end of an epoch batches of the next one are loaded ahead."""
    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


@lru_cache(maxsize=16)
def _block(num_samples: int, seed: int, number: int) -> Tensor:
    start = number * BLOCK
    positions = torch.arange(start, min(start + BLOCK, num_samples))
    return KeyedPermutation(num_samples, seed)(positions)


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of [start, stop) that is a rank's: contiguous, sizes differing by one at most."""
    each, extra = divmod(stop - start, world_size)
    own_start = start + rank * each + min(rank, extra)
    return own_start, own_start + each + (1 if rank < extra else 0)


class Loader:
    """Makes batches of a dataset in a given order."""

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        collate: Collate | None = None,
        *,
        loading: Loading | None = None,
        seed_samples: bool = True,
    ) -> None:
        """`loading`: as a DataLoader would; None: by the trainer, whole tensors by their rows."""
        self._dataset = dataset
        self.order = order
        self._columns = None if collate or loading else _columns(dataset)
        self._samples: BatchLoader | None = None
        if self._columns is None:
            samples = Samples(dataset, collate or default_collate, order.seed, seeded=seed_samples)
            self._samples = BatchLoader(samples, loading or Loading(), self._indices)
        self._epoch = -1
        self._origin = order.origin
        """Of the order, or one that equals it: as it was given last."""

    @property
    def num_columns(self) -> int | None:
        """Tensors that batches are rows of; None where samples are collated."""
        return None if self._columns is None else len(self._columns)

    def begin_at(self, origin: Position) -> None:
        """The first batches of this size are those from here on. Free to call again."""
        now = self._origin
        if origin is not now:
            if origin != now:
                self.order = replace(self.order, origin=origin)
            self._origin = origin

    def start(self) -> None:
        """Start the processes that load, where there are any. Before there are connections that
        they would inherit."""
        if self._samples is not None:
            self._samples.start()

    def while_waiting(self, looks: Callable[[float], None]) -> None:
        """Call this again and again while a batch does not come: see `BatchLoader.looks`."""
        if self._samples is not None:
            self._samples.looks = looks

    def close(self) -> None:
        """End the processes that load. May be called twice."""
        if self._samples is not None:
            self._samples.close()

    def synchronous(self, step: int, index: int, count: int) -> Batch:
        """One of `count` shares of a step that all members take together."""
        epoch, start, stop = self.order.span(step)
        own_start, own_stop = share(start, stop, index, count)

        def after() -> Iterator[Span]:
            for later in range(step + 1, self.order.num_steps):
                its_epoch, its_start, its_stop = self.order.span(later)
                own = share(its_start, its_stop, index, count)
                yield _loaded(Span(its_epoch, *own), its_start)

        loaded = _loaded(Span(epoch, own_start, own_stop), start)
        indices = self._indices(loaded.epoch, loaded.start, loaded.stop)
        try:
            inputs, targets = self._load(loaded, indices, after)
        except SampleFailed as failed:
            raise _not_collated(failed, step, indices.tolist()) from failed
        return Batch(
            inputs=inputs,
            targets=targets,
            indices=indices.tolist() if own_stop > own_start else [],
            weight=(own_stop - own_start) * count / (stop - start),
            step=step,
            epoch=epoch,
            first=own_start - start,
        )

    def leased(
        self,
        epoch: int,
        start: int,
        stop: int,
        step: int,
        *,
        after: Callable[[], Iterator[Span]] = lambda: iter(()),
    ) -> Batch:
        """The positions [start, stop) of an epoch's order, all of them this member's.

        `after`: what is likely to be asked for next.
        """
        indices = self._indices(epoch, start, stop)
        inputs, targets = self._load(Span(epoch, start, stop), indices, after)
        return Batch(
            inputs=inputs,
            targets=targets,
            indices=indices.tolist(),
            weight=1.0,
            step=step,
            epoch=epoch,
        )

    def _load(
        self, span: Span, indices: Tensor, after: Callable[[], Iterator[Span]]
    ) -> tuple[Any, Any]:
        """The samples of the span, which have these indices."""
        if span.epoch != self._epoch:
            self._check_size()
            self._epoch = span.epoch
        if self._columns is not None:
            return _split(tuple(_rows(column, indices) for column in self._columns))
        assert self._samples is not None, "data without columns is loaded by sample"
        return _split(self._samples.take(span, after))

    def _indices(self, epoch: int, start: int, stop: int) -> Tensor:
        return self.order.indices(epoch, start, stop)

    def _check_size(self) -> None:
        size = dataset_size(self._dataset)
        if size != self.order.num_samples:
            raise InvalidSpec(
                "the dataset has another length than when the batches began",
                seen=f"{size} samples",
                expected=f"{self.order.num_samples} samples",
                fix="Give a dataset that stays as long as it is. To train on more data, begin a new"
                " job with the weights of this one.",
            )


def _not_collated(failed: SampleFailed, step: int, indices: Sequence[int]) -> SampleFailed:
    """The failure by its step and its samples, where it is one of all of them together."""
    if "index" in failed.details:
        return failed
    named = ", ".join(map(str, indices[:MAX_SAMPLES_NAMED]))
    more = ", ..." if len(indices) > MAX_SAMPLES_NAMED else ""
    named_so = SampleFailed(
        f"the samples of this member's share of step {step} could not be collated",
        seen=f"{failed.seen}, for the samples {named}{more}",
        expected="a batch of every share, also where it is of one sample",
        fix="The traceback is of the script's own code. A collate function that leaves samples out"
        " may be left with none of a share: leave them out before session.batches instead, with a"
        " Subset of those that are right (docs/data.md).",
        details={"step": str(step)},
    )
    for note in getattr(failed, "__notes__", ()):
        named_so.add_note(note)
    return named_so


def _rows(column: Tensor, indices: Tensor) -> Tensor:
    # Half of the time of the other; but it takes indices of the tensor's own device only.
    return column.index_select(0, indices) if column.is_cpu else column[indices]


def _loaded(own: Span, start: int) -> Span:
    """What is loaded for a share of the batch that begins at `start`.

    A model need not cope with no samples: a member without any computes what the first one does,
    with weight 0. A sample from elsewhere might take a path through the model that none of the
    batch takes, and would give parameters of it a gradient.
    """
    return own if own.stop > own.start else Span(own.epoch, start, start + 1)


def dataset_size(dataset: Dataset) -> int:
    """Number of samples. Raises InvalidSpec for what has no length or no items by index."""
    columns = _columns(dataset)
    if columns is not None:
        return len(columns[0])
    if isinstance(dataset, tuple):
        raise InvalidSpec(
            "a tuple as the dataset holds something other than tensors",
            seen=", ".join(type(each).__name__ for each in dataset) or "nothing",
            expected="tensors of one length, such as (inputs, targets)",
            fix="torch.from_numpy(array) makes a tensor of an array; samples belong into a list.",
        )
    if (held := _tensors_beside(dataset)) is not None:
        raise InvalidSpec(
            "the dataset is a list or dict of tensors, of which each would be one sample",
            seen=held,
            expected="a tuple of tensors of one length, such as (inputs, targets)",
            fix="For batches that are dicts, a list with a dict for each sample.",
        )
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not _is_iterable(dataset):
        return len(dataset)
    raise InvalidSpec(
        "the dataset has no length, or no items by index",
        seen=type(dataset).__name__,
        expected="a map-style dataset, a DataLoader of one, or a tuple of tensors",
        fix="Samples are counted by their index, so that each counts once an epoch whoever is lost."
        " Give its shards, with the number of samples in each: shoal.Shards([...], lengths=[...]);"
        " shoal.Shards([dataset], lengths=[n]) for one that is not in shards (docs/data.md)."
        if _is_iterable(dataset)
        else "",
    )


def describe(dataset: Dataset) -> str:
    """What members compare to see that they train on the same data."""
    columns = _columns(dataset)
    if isinstance(dataset, Shards):
        return dataset.description
    if columns is None:
        return f"{type(dataset).__name__} of {dataset_size(dataset)}"
    parts = [f"{str(c.dtype).removeprefix('torch.')}{tuple(c.shape)}" for c in columns]
    return f"tensors {' '.join(parts)}"


def _is_iterable(dataset: object) -> bool:
    """torch's IterableDataset inherits a `__getitem__` that raises."""
    return isinstance(dataset, IterableDataset)


def _tensors_beside(dataset: Any) -> str | None:
    """What is in a dict, or a short list, that was meant as columns: tensors of one length. Samples
    of as many numbers of dimensions could not be collated, and a dict of names has no item 0."""
    if isinstance(dataset, Mapping) and 0 not in dataset:
        named: Mapping[Any, Any] = dataset
    elif isinstance(dataset, list) and len(dataset) <= MAX_COLUMNS_IN_LIST:
        named = dict(enumerate(dataset))
    else:
        return None
    if not all(isinstance(each, Tensor) and each.ndim for each in named.values()):
        return None
    if isinstance(dataset, list) and (
        len({each.ndim for each in dataset}) < 2 or len({len(each) for each in dataset}) > 1
    ):
        return None
    return ", ".join(f"{name}: {tuple(each.shape)}" for name, each in named.items()) or None


def _columns(dataset: Dataset) -> Sequence[Tensor] | None:
    """The dataset as whole tensors, if it is made of them: then a batch is one index operation."""
    columns: Any = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if not isinstance(columns, tuple) or not columns:
        return None
    if not all(isinstance(column, Tensor) for column in columns):
        return None
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InvalidSpec(
            "the tensors of the dataset differ in length", seen=str(lengths), expected="one length"
        )
    return columns


def _split(parts: Any) -> tuple[Any, Any]:
    """(inputs, targets): the last part of a tuple is the target, if it has more than one. A list is
    inputs as a whole, whatever its length, which may be that of the share."""
    if not isinstance(parts, tuple):
        return parts, None
    if len(parts) == 1:
        return parts[0], None
    inputs = parts[0] if len(parts) == 2 else tuple(parts[:-1])
    return inputs, parts[-1]


def _mix(seed: int, epoch: int) -> int:
    """One seed of two numbers, such that neighbouring pairs have nothing in common (splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF
