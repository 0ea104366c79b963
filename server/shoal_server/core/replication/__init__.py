"""Replication of shards: primaries, followers and acknowledgements, decided without any I/O."""
