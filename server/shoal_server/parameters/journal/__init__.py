"""The journal: a log of pushes on this server's own disk, and recovery of shards from it."""
