"""Commands that the server adds to `shoal`."""

from collections.abc import Callable


def add(command: Callable[[str, str, str, str], None]) -> None:
    """Add `shoal coordinator`, `shoal ps`, `shoal token` and `shoal config`."""
    for name, summary, config, run in (
        (
            "coordinator",
            "serve membership, rendezvous and the status page",
            "shoal_server.coordinator.config:CoordinatorConfig",
            "shoal_server.coordinator.command:coordinator",
        ),
        (
            "ps",
            "serve parameter shards",
            "shoal_server.parameters.config:ParameterServerConfig",
            "shoal_server.parameters.command:parameter_server",
        ),
        (
            "token",
            "make tokens for the status page and its API",
            "shoal_server.token_command:TokenConfig",
            "shoal_server.token_command:token",
        ),
        (
            "config",
            "print all time limits that follow from those you choose",
            "shoal_server.config_command:ShowConfig",
            "shoal_server.config_command:show",
        ),
    ):
        command(name, summary, config, run)
