"""The log of pushes on this server's own disk, and shards made again from it."""
