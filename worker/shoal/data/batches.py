"""Batches of a data set: one member's part of each step, in the order of `shoal.data.order`."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shoal.data.loading import BatchLoader, Loading, Span
from shoal.data.order import Order, SamplePosition, share
from shoal.data.parts import of_step
from shoal.data.samples import Collate, MapDataset, Samples
from shoal.data.shards import Shards
from shoal_proto.errors import InvalidSpec, SampleFailed

MAX_SAMPLES_NAMED = 8
"""Number of samples named in the error for a batch that could not be made."""
MAX_COLUMNS_IN_LIST = 8
"""A longer list of tensors is one of samples."""

Dataset = MapDataset | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One member's part of one step. `inputs, targets = batch` unpacks it; `batch["x"]` is a
    part of samples that are dicts."""

    inputs: Any
    """All parts of a sample but the last, as a tuple if there are several; the whole sample if it
    is no tuple, such as a dict."""
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
        """Number of the step's samples in this batch, for a script's counts; 0 for a stand-in."""
        return len(self.indices)

    @property
    def is_stand_in(self) -> bool:
        """True if this member, or this part, has no samples of the step: there are fewer samples
        than members, or fewer in the share than parts.

        `inputs` and `targets` then repeat another's sample, the first of the step or of the share:
        members that compute together all need a forward pass. It has weight 0.
        """
        return not self.indices

    def __iter__(self) -> Iterator[Any]:
        yield self.inputs
        yield self.targets

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.inputs, Mapping):
            raise InvalidSpec(
                "only a batch of dicts has names",
                seen=f"batch[{name!r}] of {type(self.inputs).__name__}",
                expected="batch.inputs and batch.targets",
            )
        return self.inputs[name]

    def parts(self, num_parts: int) -> Iterator["Batch"]:
        """Split this batch into micro-batches, the same number on every member:

            with session.step():
                for part in batch.parts(4):
                    session.backward(loss_fn(model(part.inputs), part.targets))

        Each part's loss is the mean over its samples; the session weights it, so that gradients are
        those of the whole global batch. They are reduced once, in the last part. Parts differ by
        one sample at most. If a share has fewer samples than there are parts, some parts are empty:
        they still hold one sample, which gets weight 0.

        Raises InvalidSpec outside a step, for fewer than one part or more than a global batch has
        samples, and if a part has no backward pass or more than one.
        """
        return of_step().parts(self, num_parts)


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
        """Origin of the order, or the last equal position that was given."""

    @property
    def num_columns(self) -> int | None:
        """Number of tensors that batches are rows of; None if samples are collated."""
        return None if self._columns is None else len(self._columns)

    def begin_at(self, origin: SamplePosition) -> None:
        """The first batches of this size are those from here on. Free to call again."""
        now = self._origin
        if origin is not now:
            if origin != now:
                self.order = replace(self.order, origin=origin)
            self._origin = origin

    def start(self) -> None:
        """Start the loading processes, if there are any, before connections exist that they would
        inherit."""
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
        """Return one of `count` shares of a step that all members take together."""
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
    """Return the failure with its step and samples if it concerns all of them together."""
    if "index" in failed.details:
        return failed
    named = ", ".join(map(str, indices[:MAX_SAMPLES_NAMED]))
    more = ", ..." if len(indices) > MAX_SAMPLES_NAMED else ""
    named_so = SampleFailed(
        f"the samples of this member's share of step {step} could not be collated",
        seen=f"{failed.seen}, for the samples {named}{more}",
        expected="a batch of every share, even if the share is one sample",
        fix="The traceback is of the script's own code. A collate function that leaves samples out"
        " may leave a share without samples: leave them out before session.batches instead, with a"
        " Subset of the valid ones (docs/data.md).",
        details={"step": str(step)},
    )
    for note in getattr(failed, "__notes__", ()):
        named_so.add_note(note)
    return named_so


def _rows(column: Tensor, indices: Tensor) -> Tensor:
    # Half of the time of the other; but it takes indices of the tensor's own device only.
    return column.index_select(0, indices) if column.is_cpu else column[indices]


def _loaded(own: Span, start: int) -> Span:
    """Samples to load for a share of the batch that begins at `start`.

    A model need not handle an empty batch. So a member without samples computes the batch's first
    one, with weight 0. A sample from elsewhere might take a path through the model that none of the
    batch takes, and give parameters on that path a gradient.
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
            "the dataset is a list or dict of tensors: each tensor would be one sample",
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
        fix="Samples are counted by their index, so that each counts once an epoch even if"
        " members are lost."
        " Give its shards, with the number of samples in each: shoal.Shards([...], lengths=[...]);"
        " shoal.Shards([dataset], lengths=[n]) for a dataset without shards (docs/data.md)."
        if _is_iterable(dataset)
        else "",
    )


def describe(dataset: Dataset) -> str:
    """Describe the data set; members compare this to see that they train on the same data."""
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
    """Describe the contents of a dict, or of a short list, that was meant as columns: tensors of
    one length. As samples such tensors could not be collated if their dimensions differ in number;
    and a dict of names has no item 0."""
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
    """Split into (inputs, targets): the last part of a tuple is the target if it has more than one
    part. A list is inputs as a whole, whatever its length, which may be that of the share."""
    if not isinstance(parts, tuple):
        return parts, None
    if len(parts) == 1:
        return parts[0], None
    inputs = parts[0] if len(parts) == 2 else tuple(parts[:-1])
    return inputs, parts[-1]
