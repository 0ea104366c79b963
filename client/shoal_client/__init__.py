"""Typed clients of Shoal's gRPC services, and the `shoal` command."""

import shoal_proto  # noqa: F401 - before gRPC: see shoal_proto.forks.grpc
