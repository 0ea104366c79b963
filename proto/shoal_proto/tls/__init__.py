"""Mutual TLS between the processes of a cluster: whose certificate a process has, and who calls."""
