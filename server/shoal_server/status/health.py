"""The health report a worker posts."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import MaxLen, MinLen
from pydantic import ConfigDict, field_validator

from shoal_proto.health import HealthFigures
from shoal_proto.incarnation import public_id
from shoal_server.status.views import HealthView, describe_figures

EXAMPLE = {
    "incarnation": "0b7f1c52-6d4e-4f0e-9a55-0d2f4d1d3a11",
    "step": 1200,
    "loss": 0.183,
    "step_time_s": 0.021,
    "samples_per_s": 12190.5,
    "memory_bytes": 734003200,
    "device": "cuda:0",
    "staleness_steps": 1.5,
    "sent_bytes_per_step": 52480,
    "compression_ratio": 31.2,
    "last_error": "",
    "generation": 4,
    "paused_s": 0.06,
    "lost_steps": 0,
    "course": {
        "num_steps": 56000,
        "checkpoint_step": 1000,
        "logged": {"accuracy": [1000, 0.97]},
    },
}


def _describe(schema: dict[str, Any]) -> None:
    describe_figures(schema)
    schema["examples"] = [EXAMPLE]


@dataclass(frozen=True, kw_only=True)
class HealthReport(HealthFigures):
    """How a worker's training goes, in its own words. Only `incarnation` is required."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        json_schema_extra=_describe,
    )

    incarnation: Annotated[str, MinLen(1), MaxLen(64)]
    """UUID of the process start that reports; another one than the member's is refused. A
    secret of that process: it is not shown."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("Input should be a number or a text, not true or false")
        return value

    def view(self, received_unix_s: float) -> HealthView:
        """The report as it is kept and shown."""
        process = public_id(self.incarnation)
        return HealthView(received_unix_s=received_unix_s, public_id=process, **self.said())
