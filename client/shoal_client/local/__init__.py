"""Processes on this machine for the user: child processes, and a whole cluster made of them."""
