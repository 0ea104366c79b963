"""Retention times of jobs that have no members, or that are over."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.core.retention import RetentionLimits

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

_RETENTION = Group("retention")


def _option(name: str) -> Parameter:
    return Parameter(name=name, metavar="SECONDS", group=_RETENTION)


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    abandon_after_s: Annotated[float, _option("--abandon-after-s")] = HOUR_S
    """A job that has had no members for this long has failed; `shoal retry` lets workers join it
    again. Each new leader counts from zero. inf: never."""
    records_s: Annotated[float, _option("--retention-s")] = DAY_S
    """Time for which a job's generations, samples and parameters are kept after its end; the
    parameters of a job that finished are removed at its end. inf: for ever."""
    summary_s: Annotated[float, _option("--summary-retention-s")] = 30 * DAY_S
    """Time for which a job's summary is kept after its end; then its name is free again. inf: for
    ever."""

    def __post_init__(self) -> None:
        options = {
            "--abandon-after-s": self.abandon_after_s,
            "--retention-s": self.records_s,
            "--summary-retention-s": self.summary_s,
        }
        for name, value in options.items():
            if not value > 0:
                raise InvalidSpec(f"bad {name}", seen=f"{value:g}", expected="seconds above 0")
        if self.summary_s < self.records_s:
            raise InvalidSpec(
                "bad --summary-retention-s",
                seen=f"{self.summary_s:g}",
                expected=f"--retention-s ({self.records_s:g}) or more",
            )

    @property
    def limits(self) -> RetentionLimits:
        return RetentionLimits(
            abandon_after_s=self.abandon_after_s,
            records_s=self.records_s,
            summary_s=self.summary_s,
        )
