"""Pulls and pushes without gRPC around them: over a socket of their own, and by shared memory."""
