"""The serving side: coordinator, parameter server, status endpoint."""

import shoal_proto  # noqa: F401 - before gRPC: see shoal_proto.forks.grpc
