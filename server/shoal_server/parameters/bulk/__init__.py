"""The bulk transport: pulls and pushes over plain sockets and shared memory instead of gRPC."""
