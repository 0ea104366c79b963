"""Replication of shards to backups, and changes of their primaries."""
