"""The history of a job as the API shows it and as it is kept, as plain data."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ChangeView:
    """Change from one generation to the next: cause, pause and loss."""

    __pydantic_config__: ClassVar[Any] = {
        "use_attribute_docstrings": True,
        "ser_json_inf_nan": "strings",
    }

    generation: int
    unix_s: float
    """When it came to run."""
    cause: str
    """Who was lost, left or came, with the cause, and how many go on."""
    line: str
    """The whole story in one line."""
    num_members: int
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    paused_s: float | None = None
    """For how long those who train on took no step, beyond what a step usually takes, as they say;
    null where nobody has said."""
    down_s: float = 0.0
    """For how long no generation ran; 0 where the one before trained on meanwhile."""
    steps_lost: int = 0
    """Steps that had been committed and were taken again."""


@dataclass(frozen=True, kw_only=True)
class LoggedView:
    """Values that the script logged under one name, over steps."""

    __pydantic_config__: ClassVar[Any] = {
        "use_attribute_docstrings": True,
        "ser_json_inf_nan": "strings",
    }

    name: str
    newest_step: int
    newest: float
    """NaN and infinity are told as text."""
    interval_steps: int
    """Steps of each interval. It doubles when there are more than 180 of them."""
    steps: tuple[int, ...] = ()
    """At which each interval with values begins."""
    values: tuple[float, ...] = ()
    """Mean of those that were told: the newest of each second or so."""


@dataclass(frozen=True, kw_only=True)
class SeriesView:
    """Measurements over time, a value for each interval; null if there was none."""

    __pydantic_config__: ClassVar[Any] = {
        "use_attribute_docstrings": True,
        "ser_json_inf_nan": "strings",
    }

    interval_s: float
    """Length of each interval. It doubles when there are more than 180 of them."""
    unix_s: tuple[float, ...] = ()
    """When each begins."""
    generation: tuple[int, ...] = ()
    """The newest that ran in it."""
    step: tuple[int, ...] = ()
    """The highest."""
    loss: tuple[float | None, ...] = ()
    """Mean over members."""
    samples_per_s: tuple[float | None, ...] = ()
    """Of all members together."""
    step_s: tuple[float | None, ...] = ()
    """Seconds that a step takes; median over members."""
    slowest_step_s: tuple[float | None, ...] = ()
    """The longest of a member."""
    staleness: tuple[float | None, ...] = ()
    """Updates of others between pull and push; mean over members."""
    step_s_by_rank: tuple[tuple[float | None, ...], ...] = ()
    """Of each of the first 8 ranks: seconds that a step takes."""
