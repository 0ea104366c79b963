"""Figures that a member reports about its training."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from annotated_types import Ge, Le, MaxLen, MinLen

MAX_COUNT = 2**53 - 1
"""Largest integer up to which numbers in JSON are exact."""

Count = Annotated[int, Ge(0), Le(MAX_COUNT)]
Amount = Annotated[float, Ge(0), Le(MAX_COUNT)]
MAX_LOGGED = 32
LoggedName = Annotated[str, MinLen(1), MaxLen(100)]
MAX_COMMAND = 4000


@dataclass(frozen=True)
class Gauge:
    """Marks a figure that is exported to Prometheus."""

    name: str


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """Command line and source of the script of a job."""

    __pydantic_config__: ClassVar[Any] = {"use_attribute_docstrings": True}

    command: Annotated[str, MaxLen(MAX_COMMAND)]
    """Script and its arguments as for a shell. Values that look like secrets are shown as ***."""
    commit: Annotated[str, MaxLen(64)] = ""
    """Git commit of the working directory; empty if there is none, or git does not say."""
    is_modified: bool | None = None
    """True if files that git tracks differ from the commit, or git does not track the script; null
    if unknown."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Parts of the time from one step to the next, on average since the last report."""

    __pydantic_config__: ClassVar[Any] = {"use_attribute_docstrings": True}

    data_s: Amount | None = None
    """Seconds of waiting for a batch to be loaded; null if the script loads batches itself."""
    compute_s: Amount
    """Seconds of a step's forward and backward passes and its update, without the exchange."""
    exchange_s: Amount
    """Seconds in which the step waited for other members or for parameter servers. Exchange that
    runs beside the backward pass, or on a GPU, does not count."""
    between_s: Amount
    """Seconds of everything else: the script's own code between steps, changes of members."""


@dataclass(frozen=True, kw_only=True)
class CourseFigures:
    """Progress of a job, as a member reports it."""

    __pydantic_config__: ClassVar[Any] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "ser_json_inf_nan": "strings",
    }

    num_steps: Count | None = None
    """Total number of steps of the job, if its members take them together."""
    checkpoint_step: Count | None = None
    """The step of the newest checkpoint that the member has helped to write."""
    checkpoint_bytes: Count | None = None
    """Bytes of that checkpoint, of all members together."""
    writes_checkpoints: bool | None = None
    """True if the script asked for checkpoints."""
    logged: Annotated[dict[LoggedName, tuple[Count, float]], MaxLen(MAX_LOGGED)] = field(
        default_factory=dict
    )
    """Step and newest value of each name that the script logged; reported by the member that writes
    to the trackers. "NaN" and "Infinity" (as text) are allowed."""
    run: RunOrigin | None = None
    """Command line and commit; reported by the same member."""


@dataclass(frozen=True, kw_only=True)
class HealthFigures:
    """Figures of a member's training, as it reports them. None: not reported."""

    __pydantic_config__: ClassVar[Any] = {"use_attribute_docstrings": True}
    """A server makes a schema of this class with the texts below."""

    step: Count | None = None
    """Optimizer steps so far."""
    loss: Annotated[float | None, Gauge("shoal_member_loss_value")] = None
    """Newest loss. "NaN" and "Infinity" (as text) are allowed, and shown as reported."""
    step_time_s: Annotated[Amount | None, Gauge("shoal_member_step_duration_seconds")] = None
    """Seconds that the newest step took."""
    step_parts: StepParts | None = None
    """Parts of the time from one step to the next."""
    samples_per_s: Annotated[Amount | None, Gauge("shoal_member_throughput_samples_per_second")] = (
        None
    )
    """Samples this member trains on in a second."""
    memory_bytes: Annotated[Count | None, Gauge("shoal_member_memory_bytes")] = None
    """Memory in use: what torch has reserved on the GPU, or the process's if it trains on the
    CPU."""
    cpu_cores: Annotated[Amount | None, Gauge("shoal_member_cpu_cores")] = None
    """Processors that the process used on average: 1.5 is one and a half. Processes that it has
    started, such as a DataLoader's workers, do not count."""
    host_received_bytes_per_s: Annotated[
        Amount | None, Gauge("shoal_member_host_received_bytes_per_second")
    ] = None
    """Bytes that the member's host receives in a second, for all its processes; without
    loopback."""
    host_sent_bytes_per_s: Annotated[
        Amount | None, Gauge("shoal_member_host_sent_bytes_per_second")
    ] = None
    """Bytes that the member's host sends in a second, for all its processes; without loopback."""
    device: Annotated[str, MaxLen(100)] | None = None
    """Device that the member trains on: cpu, cuda:0 ..."""
    staleness_steps: Annotated[Amount | None, Gauge("shoal_member_staleness_steps")] = None
    """Mean number of updates by others between this member's pull and its push."""
    sent_bytes_per_step: Annotated[Amount | None, Gauge("shoal_member_sent_bytes")] = None
    """Bytes that this member sent for its gradients in the newest step."""
    compression_ratio: Annotated[Amount | None, Gauge("shoal_member_compression_ratio")] = None
    """Ratio of the bytes without compression to those sent, in the newest step."""
    last_error: Annotated[str, MaxLen(2000)] | None = None
    """Current warning of the strategy, for example that the loss no longer falls; empty: none."""
    generation: Count | None = None
    """The generation in which the member took its newest step."""
    paused_s: Amount | None = None
    """Seconds without a step before the member's first one in that generation, beyond the usual
    time of a step; only if the member had trained before."""
    lost_steps: Count | None = None
    """Number of committed steps that the member took again in that generation."""
    course: CourseFigures | None = None
    """Progress of the job."""

    def known_figures(self) -> dict[str, Any]:
        """Return the figures that are not None, by name."""
        known = {each.name: getattr(self, each.name) for each in fields(HealthFigures)}
        return {name: value for name, value in known.items() if value is not None}


def gauges() -> dict[str, str]:
    """Return the names in Prometheus, by figure."""
    return {name: mark.name for name, mark in _marked(Gauge)}


def max_lengths() -> dict[str, int]:
    """Return the maximum length of each figure that is a text."""
    return {name: mark.max_length for name, mark in _marked(MaxLen)}


def _marked(kind: type) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(HealthFigures, include_extras=True).items():
        # Annotated[X | None, mark]: the whole hint has the mark. Annotated[X, mark] | None: a
        # member of the union has it.
        parts = [hint, *get_args(hint)]
        marks = [mark for part in parts for mark in getattr(part, "__metadata__", ())]
        yield from ((name, mark) for mark in marks if isinstance(mark, kind))


__all__ = [
    "MAX_COMMAND",
    "MAX_COUNT",
    "MAX_LOGGED",
    "CourseFigures",
    "HealthFigures",
    "RunOrigin",
    "StepParts",
    "gauges",
    "max_lengths",
]
