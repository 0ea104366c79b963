"""The history of a job as plain data, for the API and for storage."""

from dataclasses import dataclass

from shoal_server.serving.json_view import View


@dataclass(frozen=True, kw_only=True)
class ChangeView(View):
    """Change from one generation to the next: cause, pause and loss."""

    generation: int
    unix_s: float
    """Time at which the generation began to run."""
    cause: str
    """Members that were lost, left or joined, with the cause, and how many continue."""
    line: str
    """The whole change in one line."""
    num_members: int
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    paused_s: float | None = None
    """Seconds in which the members that continue took no step, beyond the usual time of a step, as
    they report; null if none has reported."""
    down_s: float = 0.0
    """Seconds in which no generation ran; 0 if the former generation trained on meanwhile."""
    steps_lost: int = 0
    """Steps that had been committed and were taken again."""


@dataclass(frozen=True, kw_only=True)
class LoggedView(View):
    """Values that the script logged under one name, over steps."""

    name: str
    newest_step: int
    newest: float
    """Newest value; NaN and infinity are given as text."""
    interval_steps: int
    """Length of each interval in steps: a power of two, so that there are at most 256 intervals."""
    steps: tuple[int, ...] = ()
    """First step of each interval that has values."""
    values: tuple[float, ...] = ()
    """Mean of the reported values in each interval; about one value a second is reported."""


@dataclass(frozen=True, kw_only=True)
class SeriesView(View):
    """Measurements over time, a value for each interval; null if there was none."""

    interval_s: float
    """Length of each interval: 1, 2, 4 ... seconds, so that there are at most 256 intervals."""
    unix_s: tuple[float, ...] = ()
    """Start of each interval."""
    generation: tuple[int, ...] = ()
    """Newest generation that ran in the interval."""
    step: tuple[int, ...] = ()
    """Highest step."""
    loss: tuple[float | None, ...] = ()
    """Mean over members."""
    samples_per_s: tuple[float | None, ...] = ()
    """Sum over members."""
    step_s: tuple[float | None, ...] = ()
    """Seconds that a step takes; median over members."""
    slowest_step_s: tuple[float | None, ...] = ()
    """Longest step time of a member."""
    staleness: tuple[float | None, ...] = ()
    """Updates of others between pull and push; mean over members."""
    step_s_by_rank: tuple[tuple[float | None, ...], ...] = ()
    """Seconds that a step takes, for each of the first 8 ranks."""
