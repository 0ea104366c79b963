"""Wait for a renewed certificate. A certificate may expire during training, or be renewed on one
side first: a refused process tries again."""

import os

from shoal_proto.errors import CertificateRefused, InvalidSpec

VARIABLE = "SHOAL_CERTIFICATE_WAIT_S"
DEFAULT_WAIT_S = 600.0


def wait_s() -> float:
    """Time limit of the wait; 0: a refused certificate ends a member at once. Raises
    InvalidSpec."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else DEFAULT_WAIT_S
    except ValueError:
        found = -1.0
    if not 0.0 <= found < float("inf"):
        raise InvalidSpec(f"bad {VARIABLE}", seen=repr(text), expected="seconds, 0 or more")
    return found


class CertificateWait:
    """Time limit of a wait, which lasts from the first refusal until a connection succeeds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """True from a refusal until a connection succeeds."""
        return self._since_s is not None

    def record_refusal(self, now_s: float) -> bool:
        """Record a refusal; True if there is time left to try again."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < self.limit_s

    def record_acceptance(self) -> bool:
        """Record a connection; True if this ends a wait."""
        was_on, self._since_s = self.is_waiting, None
        return was_on

    def final_error(self, error: CertificateRefused) -> CertificateRefused:
        """Error to raise once the time is over."""
        return CertificateRefused(
            f"{error.what}, for {self.limit_s:g} s ({VARIABLE})",
            seen=error.seen,
            expected=error.expected,
            fix=error.fix,
        )
