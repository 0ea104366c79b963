"""The journal: a log of pushes on this server's disk."""
