"""`shoal coordinator`."""

from shoal_server.coordinator.config import CoordinatorConfig
from shoal_server.serving.command import lacks, run


def coordinator(config: CoordinatorConfig) -> int:
    """Serve as a coordinator until SIGTERM or SIGINT."""
    if lacks("coordinator", "grpc_health", "fastapi", "prometheus_client"):
        return 1
    from shoal_server.coordinator.process import serve  # noqa: PLC0415

    return run("coordinator", serve(config))
