"""Foundations of the server's processes: listening, gRPC, message bounds."""
