"""Descriptions of how a process ended, by its exit code; -N stands for signal N."""

import signal


def exit_cause(code: int) -> str:
    """Cause of an end: "SIGKILL", "exit code 1"."""
    if code >= 0:
        return f"exit code {code}"
    # Real-time signals have no names.
    known = -code in set(signal.Signals)
    return signal.Signals(-code).name if known else f"signal {-code}"


def describe_exit(code: int) -> str:
    """Predicate of a sentence about the process: "was killed by SIGKILL"."""
    return f"{'ended with' if code >= 0 else 'was killed by'} {exit_cause(code)}"
