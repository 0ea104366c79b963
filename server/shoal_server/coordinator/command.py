"""The command `shoal coordinator`."""

from shoal_server.coordinator.config import CoordinatorConfig
from shoal_server.serving.command import is_module_missing, run


def coordinator(config: CoordinatorConfig) -> int:
    """Serve as a coordinator until SIGTERM or SIGINT."""
    if is_module_missing("coordinator", "grpc_health", "fastapi", "prometheus_client"):
        return 1
    from shoal_server.coordinator.process import serve  # noqa: PLC0415

    return run("coordinator", serve(config))
