"""Commands that the worker adds to `shoal`."""

from collections.abc import Callable


def add(command: Callable[[str, str, str, str], None]) -> None:
    """Add `shoal run`."""
    command(
        "run",
        "start and watch the workers of a job, on this host or over ssh",
        "shoal.launcher.run_config:RunConfig",
        "shoal.launcher.command:run",
    )
