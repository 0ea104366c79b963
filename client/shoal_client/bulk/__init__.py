"""Pulls and pushes without gRPC: over sockets and through shared memory."""
