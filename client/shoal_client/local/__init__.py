"""Processes on this machine: child processes, and a whole cluster of them."""
