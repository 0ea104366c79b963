"""`shoal ps`."""

from shoal_server.parameters.config import ParameterServerConfig
from shoal_server.serving.command import is_module_missing, run


def parameter_server(config: ParameterServerConfig) -> int:
    """Serve shards until SIGTERM or SIGINT."""
    if is_module_missing("ps", "torch", "grpc_health", extra="server"):
        return 1
    from shoal_server.parameters.process import serve  # noqa: PLC0415

    return run("ps", serve(config))
