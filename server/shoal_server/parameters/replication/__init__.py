"""Replication of shards: streams to backups, failover, handover, recovery from the journal."""
