"""Typed clients of Shoal's gRPC services, and the `shoal` command."""
