"""The health report a worker posts."""

from pydantic import BaseModel, ConfigDict, Field

from shoal_proto.incarnation import public_id
from shoal_server.status.views import HealthView

MAX_COUNT = 2**53 - 1


class HealthReport(BaseModel):
    """How a worker's training goes, in its own words. Only `incarnation` is required."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        json_schema_extra={
            "examples": [
                {
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
                }
            ]
        },
    )

    incarnation: str = Field(min_length=1, max_length=64)
    """UUID of the process start that reports; another one than the member's is refused. A
    secret of that process: it is not shown."""
    step: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Optimizer steps so far."""
    loss: float | None = None
    """Newest loss. "NaN" and "Infinity" (as text) are allowed: they are news, not a bad report."""
    step_time_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Seconds that a step takes."""
    samples_per_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Samples this member trains on in a second."""
    memory_bytes: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Memory in use: the device's, or the process's where it trains on the CPU."""
    device: str = Field("", max_length=100)
    """What it trains on: cpu, cuda:0 ..."""
    staleness_steps: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Mean number of updates by others between this member's pull and its push."""
    sent_bytes_per_step: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Bytes that this member sent for its gradients in the newest step."""
    compression_ratio: float | None = Field(None, ge=0, allow_inf_nan=False)
    """How many times more that would have been without compression."""
    last_error: str = Field("", max_length=2000)
    """The last error the training went through, if any."""

    def view(self, received_unix_s: float) -> HealthView:
        """The report as it is kept and shown."""
        fields = self.model_dump(exclude={"incarnation"})
        process = public_id(self.incarnation)
        return HealthView(received_unix_s=received_unix_s, public_id=process, **fields)
