"""Replication of shards: decisions without I/O."""
