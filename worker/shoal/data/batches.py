"""Batches of a data set: one member's share of each step."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shoal.data.loading import BatchLoader, Loading
from shoal.data.order import Order, SamplePosition, range_of_rank
from shoal.data.parts import of_step
from shoal.data.samples import Collate, MapDataset, Samples
from shoal.data.shards import Shards
from shoal_client.progress.ranges import SampleRange
from shoal_proto.errors import InvalidSpec, SampleFailed

MAX_SAMPLES_NAMED = 8
MAX_COLUMNS_IN_LIST = 8
"""Longest list of tensors that may be meant as columns; in a longer one each is a sample."""

Dataset = MapDataset | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Share of one member in one step. `inputs, targets = batch` unpacks it. If samples are dicts,
    `batch["x"]` is their entry "x"."""

    inputs: Any
    """All parts of the collated samples except the last, as a tuple if there are several. A single
    part, and collated samples that are not a tuple, such as a dict, are inputs."""
    targets: Any
    """The last part; None if the collated samples are not a tuple, or have one part."""
    indices: list[int]
    """Indices of these samples in the dataset; empty for a stand-in."""
    weight: float
    """Size of this share relative to the mean share of the global batch."""
    step: int
    """Number of optimizer steps before this one."""
    epoch: int
    first: int = 0
    """Position of the first sample in the global batch."""

    @property
    def num_samples(self) -> int:
        """Number of the step's samples in this batch; 0 for a stand-in."""
        return len(self.indices)

    @property
    def is_stand_in(self) -> bool:
        """True if this batch has no samples of the step: the step has fewer samples than members,
        or the share fewer samples than parts.

        `inputs` and `targets` then repeat a sample, with weight 0: members that compute together
        all need a forward pass.
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

        Each part's loss is the mean over its samples. The session weights the loss, so that the
        step's gradients are the whole global batch's. Gradients are reduced once, in the last part.
        Parts differ in size by at most one sample. If a share has fewer samples than parts, the
        remaining parts are stand-ins: one sample with weight 0.

        Raises InvalidSpec outside a step; for a batch other than the step's; for a second loop, or
        a loop after a backward pass; if `num_parts` is below 1 or above the global batch size; if
        the batch cannot be cut by sample; and if a part has no backward pass or several."""
        return of_step().parts(self, num_parts)


class Loader:
    """Loader of batches of a dataset."""

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        collate: Collate | None = None,
        *,
        loading: Loading | None = None,
        seed_samples: bool = True,
    ) -> None:
        """`loading`: options as in a DataLoader; None: the trainer loads, and without `collate`
        indexes whole tensors by row."""
        self._dataset = dataset
        self.order = order
        self._columns = None if collate or loading else _columns(dataset)
        self._samples: BatchLoader | None = None
        if self._columns is None:
            samples = Samples(dataset, collate or default_collate, order.seed, seeded=seed_samples)
            self._samples = BatchLoader(samples, loading or Loading(), self._indices)
        self._epoch = -1
        self._origin = order.origin

    @property
    def num_columns(self) -> int | None:
        """Number of tensors with the samples as rows; None if samples are collated."""
        return None if self._columns is None else len(self._columns)

    def begin_at(self, origin: SamplePosition) -> None:
        """Set the position from which batches have the present size. Cheap if it is unchanged."""
        before = self._origin
        if origin is not before:
            if origin != before:
                self.order = replace(self.order, origin=origin)
            self._origin = origin

    def start(self) -> None:
        """Start the loading processes. Call it before connections exist: the processes would
        inherit them. Raises LoadingFailed."""
        if self._samples is not None:
            self._samples.start()

    def set_wait_callback(self, callback: Callable[[float], None]) -> None:
        """Set `BatchLoader.on_wait`."""
        if self._samples is not None:
            self._samples.on_wait = callback

    def close(self) -> None:
        """End the loading processes. May be called twice."""
        if self._samples is not None:
            self._samples.close()

    def synchronous(self, step: int, index: int, count: int) -> Batch:
        """Return share `index` of the `count` shares of a step that all members take together.
        Raises what `BatchLoader.take` raises, and InvalidSpec if the dataset's length has
        changed."""
        epoch, start, stop = self.order.span(step)
        own_start, own_stop = range_of_rank(start, stop, index, count)

        def after() -> Iterator[SampleRange]:
            for later in range(step + 1, self.order.num_steps):
                its_epoch, its_start, its_stop = self.order.span(later)
                later_share = range_of_rank(its_start, its_stop, index, count)
                yield _loaded(SampleRange(its_epoch, *later_share), its_start)

        loaded = _loaded(SampleRange(epoch, own_start, own_stop), start)
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
        after: Callable[[], Iterator[SampleRange]] = lambda: iter(()),
    ) -> Batch:
        """Return a batch of this member alone: samples [start, stop) of an epoch's order.

        `after` yields the spans that are likely to be requested next. Raises what `synchronous`
        raises.
        """
        indices = self._indices(epoch, start, stop)
        inputs, targets = self._load(SampleRange(epoch, start, stop), indices, after)
        return Batch(
            inputs=inputs,
            targets=targets,
            indices=indices.tolist(),
            weight=1.0,
            step=step,
            epoch=epoch,
        )

    def _load(
        self, span: SampleRange, indices: Tensor, after: Callable[[], Iterator[SampleRange]]
    ) -> tuple[Any, Any]:
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
                fix="Give a dataset whose length does not change. To train on more data, begin a"
                " new job with the weights of this one.",
            )


def _not_collated(failed: SampleFailed, step: int, indices: Sequence[int]) -> SampleFailed:
    if "index" in failed.details:
        return failed
    named = ", ".join(map(str, indices[:MAX_SAMPLES_NAMED]))
    more = ", ..." if len(indices) > MAX_SAMPLES_NAMED else ""
    described = SampleFailed(
        f"the samples of this member's share of step {step} could not be delivered as a batch",
        seen=f"{failed.seen}, for the samples {named}{more}",
        expected="a batch of every share, even if the share is one sample",
        fix="The traceback is of the script's own code. A collate function that leaves samples out"
        " may leave a share without samples: leave them out before session.batches instead, with a"
        " Subset of the valid ones (docs/data.md).",
        details={"step": str(step)},
    )
    for note in getattr(failed, "__notes__", ()):
        described.add_note(note)
    return described


def _rows(column: Tensor, indices: Tensor) -> Tensor:
    # `index_select` is twice as fast, but needs indices on the tensor's device.
    return column.index_select(0, indices) if column.is_cpu else column[indices]


def _loaded(span: SampleRange, start: int) -> SampleRange:
    """Return the span to load for a share of the batch that begins at `start`.

    A member without samples loads the batch's first sample: another batch's sample could give
    gradients to other parameters.
    """
    return span if span.stop > span.start else SampleRange(span.epoch, start, start + 1)


def dataset_size(dataset: Dataset) -> int:
    """Return the number of samples. Raises InvalidSpec for a dataset without length or indexing,
    and for tensors that differ in length or would be misread as samples."""
    columns = _columns(dataset)
    if columns is not None:
        return len(columns[0])
    if isinstance(dataset, tuple):
        raise InvalidSpec(
            "the dataset is a tuple of something other than tensors",
            seen=", ".join(type(each).__name__ for each in dataset) or "nothing",
            expected="tensors of one length, such as (inputs, targets)",
            fix="torch.from_numpy(array) makes a tensor of an array. Put samples into a list.",
        )
    if (held := _misused_tensors(dataset)) is not None:
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
    """Describe the data set; members compare the text."""
    columns = _columns(dataset)
    if isinstance(dataset, Shards):
        return dataset.description
    if columns is None:
        return f"{type(dataset).__name__} of {dataset_size(dataset)}"
    parts = [f"{str(c.dtype).removeprefix('torch.')}{tuple(c.shape)}" for c in columns]
    return f"tensors {' '.join(parts)}"


def _is_iterable(dataset: object) -> bool:
    return isinstance(dataset, IterableDataset)


def _misused_tensors(dataset: Any) -> str | None:
    """Describe tensors of a dict or short list that must be meant as columns, else None.

    A dict without the key 0 has no samples by number. Tensors of one length with different numbers
    of dimensions cannot be collated.
    """
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
    # Not isinstance: a subclass may compute its samples from the tensors.
    columns: Any = dataset.tensors if type(dataset) is TensorDataset else dataset
    if not isinstance(columns, tuple) or not columns:
        return None
    if not all(isinstance(column, Tensor) for column in columns):
        return None
    lengths = [len(column) if column.ndim else None for column in columns]
    if len(set(lengths)) != 1 or None in lengths:
        raise InvalidSpec(
            "the tensors of the dataset differ in length, or have none",
            seen=str(lengths),
            expected="one length",
        )
    return columns


def _split(parts: Any) -> tuple[Any, Any]:
    """Split into (inputs, targets). Only a tuple of several parts has targets."""
    if not isinstance(parts, tuple):
        return parts, None
    if len(parts) == 1:
        return parts[0], None
    inputs = parts[0] if len(parts) == 2 else tuple(parts[:-1])
    return inputs, parts[-1]
