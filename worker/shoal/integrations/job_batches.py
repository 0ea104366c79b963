"""A job's batches for trainers with their own loop."""

from typing import TYPE_CHECKING, Any, Unpack

from torch.utils.data import DataLoader

from shoal.data.batch_options import BatchOptions, LoadingOptions
from shoal.data.batches import Batch, Dataset
from shoal.data.order import Order
from shoal.data.samples import Collate

if TYPE_CHECKING:
    from shoal.session.batch_sources import Batches
    from shoal.session.session import Session


class WholeCollate:
    """Returns the result of the script's own `collate` as entry "batch" of a dict."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        collated = self._collate(samples)
        # A list's items might be tensors of single samples.
        return {"batch": tuple(collated) if isinstance(collated, list) else collated}


class JobBatches:
    """Batches with this member's part of each step of the job.

    Takes the arguments of `Session.batches`, which is called for the first batch. The constructor
    raises InvalidSpec for arguments that `Session.batches` would refuse.
    """

    def __init__(
        self,
        session: "Session",
        dataset: Dataset | DataLoader[Any],
        *,
        global_batch_size: int | None = None,
        epochs: int = 1,
        seed: int | None = None,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        self._session, self._dataset = session, dataset
        self._options: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "epochs": epochs,
            "seed": seed,
            "shuffle": shuffle,
            "collate": collate,
        }
        self._loading = loading
        loader = BatchOptions.of(**self._options, options=loading).loader(dataset)
        self._planned = loader.order
        self.num_columns = loader.num_columns
        self._batches: Batches | None = None

    @property
    def _order(self) -> Order:
        # Only the session's order has the position of a changed batch size.
        return self._planned if self._batches is None else self._batches.order

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of a whole epoch."""
        return self._order.steps_per_epoch

    @property
    def num_steps(self) -> int:
        """Number of steps of the job. If the run continues a checkpoint of another batch size, the
        number is right once a batch was taken."""
        return self._order.num_steps

    @property
    def step_number(self) -> int:
        return self._session.step_number

    @property
    def epoch_is_done(self) -> bool:
        """True if the last committed step ended its epoch; also before the first step."""
        return self.epoch_and_batch_index(self._session.step_number)[1] == 0

    @property
    def num_epochs_done(self) -> int:
        """Number of epochs that are committed whole."""
        return self.epoch_and_batch_index(self._session.step_number)[0]

    @property
    def last_is_done(self) -> bool:
        """True if this member has committed the job's last step."""
        return self._session.step_number >= self._order.num_steps

    def epoch_and_batch_index(self, step: int) -> tuple[int, int]:
        """See `Order.epoch_and_batch_index`."""
        return self._order.epoch_and_batch_index(step)

    def take(self) -> Batch | None:
        """Return this member's part of the next step; None after the last."""
        if self._batches is None:
            self._batches = self._session.batches(self._dataset, **self._options, **self._loading)
        return next(self._batches, None)
