"""Foundations of coordinators and parameter servers: options, listening, gRPC, access, limits."""
