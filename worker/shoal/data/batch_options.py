"""Options of a script's batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from shoal.data.batches import Dataset, Loader, dataset_size, describe
from shoal.data.loading import Loading
from shoal.data.order import Order
from shoal.data.samples import Collate
from shoal.data.shard_order import ShardOrder
from shoal.data.shards import Shards
from shoal_proto.errors import InvalidSpec

_HINTS = {
    "batch_size": "global_batch_size is the size of the batch of all members together.",
    "sampler": "Subset(dataset, the sampler's indices) with shuffle=False: 'An order of your own'"
    " in docs/data.md.",
    "num_epochs": "epochs= is the number of epochs.",
}


class LoadingOptions(TypedDict, total=False):
    """Options for loading samples, most of them keywords of torch's DataLoader.

    An option that is not given is taken from the script's DataLoader, or else has `Loading`'s
    default.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    timeout: float
    silence_s: float
    collate_fn: Collate | None
    """Another name of the option `collate`, as in torch."""
    drop_last: bool
    """Leave out an epoch's last samples if they do not fill a global batch."""
    seed_samples: bool
    """Seed the generators for each sample (default). False: for a dataset without random numbers,
    or with its own generators."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A script's options; None: not given."""

    global_batch_size: int | None = None
    epochs: int = 1
    seed: int | None = None
    shuffle: bool | None = None
    collate: Collate | None = None
    drop_last: bool | None = None
    seed_samples: bool = True
    loading: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        *,
        global_batch_size: int | None,
        epochs: int,
        seed: int | None,
        shuffle: bool | None,
        collate: Collate | None,
        options: LoadingOptions,
    ) -> "BatchOptions":
        """Make options from keywords. Raises InvalidSpec for unknown or contradictory keywords."""
        known = {field.name for field in fields(Loading)}
        unknown = sorted(options.keys() - known - LoadingOptions.__annotations__.keys())
        if unknown:
            raise InvalidSpec(
                f"session.batches has no option {unknown[0]}",
                seen=", ".join(unknown),
                expected=", ".join(LoadingOptions.__annotations__),
                fix=_HINTS.get(unknown[0], ""),
            )
        collate_fn = options.get("collate_fn")
        if collate is not None and collate_fn is not None:
            raise InvalidSpec(
                "collate and collate_fn are one option, and both are given", expected="one of them"
            )
        return cls(
            global_batch_size=global_batch_size,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            collate=collate or collate_fn,
            drop_last=options.get("drop_last"),
            seed_samples=options.get("seed_samples", True),
            loading={name: value for name, value in options.items() if name in known},
        )

    def loader(self, dataset: "Dataset | DataLoader[Any]", *, together: bool = True) -> Loader:
        """Make the loader. `together`: True if members share each batch, False if each member takes
        whole batches.

        Raises InvalidSpec if the samples of each step are not determined, and for options out of
        range.
        """
        if isinstance(dataset, DataLoader):
            dataset_size(dataset.dataset)
            return _completed(self, dataset).loader(dataset.dataset, together=together)
        if self.global_batch_size is None:
            raise InvalidSpec(
                "the number of samples in a step is not given",
                expected="global_batch_size, or a DataLoader with a batch_size",
            )
        num_samples = dataset_size(dataset)
        order_options: dict[str, Any] = {
            "global_batch_size": self.global_batch_size,
            "num_epochs": self.epochs,
            "seed": 0 if self.seed is None else self.seed,
            "shuffle": self.shuffle is not False,
            "drop_last": bool(self.drop_last),
        }
        if isinstance(dataset, Shards):
            order: Order = ShardOrder.of(dataset, **order_options, together=together)
        else:
            order = Order(num_samples=num_samples, **order_options)
        loading = Loading(**self.loading)
        if isinstance(dataset, tuple):
            dataset = TensorDataset(*dataset)
        return Loader(
            dataset,
            order,
            self.collate,
            # With None the Loader indexes whole tensors in place.
            loading=None if loading == Loading() else loading,
            seed_samples=self.seed_samples,
        )


def fields_of(dataset: "Dataset | DataLoader[Any]", order: Order) -> dict[str, str]:
    """Return the proposal's fields about the samples."""
    samples = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    fields = {
        "global_batch": str(order.global_batch_size),
        "dataset": describe(samples),
        "seed": str(order.seed),
        "epochs": str(order.num_epochs),
        "shuffle": str(order.shuffle).lower(),
    }
    if order.drop_last:
        fields["drop_last"] = "true"
    if order.rule > 1:
        fields["order"] = order.name
    return fields


def _completed(options: BatchOptions, loader: "DataLoader[Any]") -> BatchOptions:
    if loader.batch_size is None:
        seen = type(loader.batch_sampler).__name__
        raise _unkept("batch_sampler", seen, "batch_size=..., and no batch_sampler")
    sampler: Any = loader.sampler
    source: Any
    seed: int | None = None
    generator = loader.generator
    # Not isinstance: a subclass may choose other samples.
    if type(sampler) is DistributedSampler:
        source, shuffle, seed = sampler.dataset, sampler.shuffle, sampler.seed
        if sampler.drop_last:
            raise _unkept("sampler", "DistributedSampler(drop_last=True)", "drop_last=False")
        if sampler.num_replicas > 1 and options.global_batch_size is None:
            raise _two_sizes(loader.batch_size, sampler.num_replicas)
    elif type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            drawn = f"RandomSampler of {sampler.num_samples} samples"
            raise _unkept("sampler", drawn, "each sample once an epoch")
        source, shuffle, generator = sampler.data_source, True, sampler.generator or generator
    elif type(sampler) is SequentialSampler:
        source, shuffle = sampler.data_source, False
    else:
        raise _unkept("sampler", type(sampler).__name__, "shuffle=True or shuffle=False")
    num_samples = dataset_size(loader.dataset)
    if len(source) != num_samples:
        seen = f"{type(sampler).__name__} of {len(source)} samples"
        raise _unkept("sampler", seen, f"a sampler of all {num_samples} samples of the dataset")
    if seed is None and isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
    return replace(
        options,
        global_batch_size=(
            loader.batch_size if options.global_batch_size is None else options.global_batch_size
        ),
        seed=seed if options.seed is None else options.seed,
        shuffle=shuffle if options.shuffle is None else options.shuffle,
        collate=options.collate or own_collate(loader),
        drop_last=loader.drop_last if options.drop_last is None else options.drop_last,
        loading={**_loading_of(loader), **options.loading},
    )


def own_collate(loader: "DataLoader[Any]") -> Collate | None:
    """Return the loader's collate function; None for torch's default, with which whole tensors can
    be indexed in place."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _loading_of(loader: "DataLoader[Any]") -> dict[str, Any]:
    names = (field.name for field in fields(Loading) if hasattr(loader, field.name))
    options = {name: getattr(loader, name) for name in names}
    if not loader.num_workers:
        # Without processes, these values are torch's, not the script's.
        del options["prefetch_factor"], options["persistent_workers"]
    return options


def _two_sizes(batch_size: int, num_replicas: int) -> InvalidSpec:
    return InvalidSpec(
        "a DataLoader with a DistributedSampler has the batch of one process, not of all",
        seen=f"batch_size={batch_size} of each of {num_replicas} processes, and no"
        " global_batch_size",
        expected="the number of samples of one step, over all members",
        fix=f"session.batches(loader, global_batch_size={batch_size * num_replicas}) trains with"
        " the same batches.",
    )


def _unkept(part: str, seen: str, expected: str) -> InvalidSpec:
    return InvalidSpec(
        f"the DataLoader's {part} decides which samples are in each batch",
        seen=seen,
        expected=expected,
        fix="The session cuts each batch for the present members, whose number changes, and"
        " counts each sample once an epoch. Give the dataset, with global_batch_size, shuffle and"
        " seed. For an order of your own: Subset(dataset, the sampler's indices), seeded, with"
        ' shuffle=False: "An order of your own" in docs/data.md.',
    )
