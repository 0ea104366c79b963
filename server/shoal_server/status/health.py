"""The health report that a worker posts."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import ConfigDict, field_validator, model_validator

from shoal_proto.health import CourseFigures, HealthFigures
from shoal_proto.incarnation import public_id
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_server.status.views import HealthView, describe_figures

MAX_PROTOCOL = 2**31 - 1
EXAMPLE = {
    "incarnation": "0b7f1c52-6d4e-4f0e-9a55-0d2f4d1d3a11",
    "step": 1200,
    "loss": 0.183,
    "step_time_s": 0.021,
    "step_parts": {"data_s": 0.001, "compute_s": 0.015, "exchange_s": 0.005, "between_s": 0.0},
    "samples_per_s": 12190.5,
    "memory_bytes": 734003200,
    "cpu_cores": 1.5,
    "host_received_bytes_per_s": 1.2e8,
    "host_sent_bytes_per_s": 1.1e8,
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
        "checkpoint_bytes": 1258291200,
        "writes_checkpoints": True,
        "logged": {"accuracy": [1000, 0.97]},
        "run": {
            "command": "train.py --lr 0.1",
            "commit": "0b7f1c526d4e4f0e9a550d2f4d1d3a110b7f1c52",
            "is_modified": False,
        },
    },
}


def _named(value: object, figures: type) -> Any:
    """Entries of a JSON object whose names are fields of `figures`; a value of another type is
    returned unchanged."""
    if not isinstance(value, dict):
        return value
    names = {each.name for each in fields(figures)}
    return {name: each for name, each in value.items() if name in names}


def _describe(schema: dict[str, Any]) -> None:
    describe_figures(schema)
    schema["examples"] = [EXAMPLE]


@dataclass(frozen=True, kw_only=True)
class HealthReport(HealthFigures):
    """Report of a worker on its training. Only `incarnation` is required."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        json_schema_extra=_describe,
    )

    protocol: Annotated[int, Ge(0), Le(MAX_PROTOCOL)] = 0
    """The newest version of the protocol that the worker speaks. If it is later than the
    coordinator's, unknown figures of the report and of `course` are ignored; else they are
    refused. Unknown figures within `step_parts` and `course.run` are always ignored."""
    incarnation: Annotated[str, MinLen(1), MaxLen(64)]
    """UUID of the reporting process, which must be the member's current one. A secret: it is never
    shown."""

    @model_validator(mode="before")
    @classmethod
    def _pass_over_later_figures(cls, value: object) -> object:
        protocol = value.get("protocol") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(protocol, int):
            return value
        if protocol <= OWN_PROTOCOLS.newest:
            return value
        known = _named(value, HealthReport)
        course = known.get("course")
        return {**known, "course": _named(course, CourseFigures)} if course else known

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("Input should be a number or a text, not true or false")
        return value

    def view(self, received_unix_s: float) -> HealthView:
        """The report as the coordinator keeps and shows it."""
        process = public_id(self.incarnation)
        return HealthView(
            received_unix_s=received_unix_s, public_id=process, **self.known_figures()
        )
