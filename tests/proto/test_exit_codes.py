"""Ends of processes in words."""

import pytest

from shoal_proto.exit_codes import describe_exit, exit_cause


@pytest.mark.parametrize(
    ("code", "cause", "description"),
    [
        (0, "exit code 0", "ended with exit code 0"),
        (3, "exit code 3", "ended with exit code 3"),
        (-9, "SIGKILL", "was killed by SIGKILL"),
        (-40, "signal 40", "was killed by signal 40"),  # a real-time signal has no name
    ],
)
def test_an_end_is_described_by_its_exit_code(code: int, cause: str, description: str) -> None:
    assert exit_cause(code) == cause
    assert describe_exit(code) == description
