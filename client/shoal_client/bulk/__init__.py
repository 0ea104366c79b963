"""Pulls and pushes without gRPC: over a separate socket, and through shared memory."""
