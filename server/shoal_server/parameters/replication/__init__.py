"""Replication of shards to backups. The classes live on the event loop; `run` runs large work in
threads."""
