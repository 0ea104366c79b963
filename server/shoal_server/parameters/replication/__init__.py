"""Copies of shards on other servers: streams to backups, failover, handing over, recovery."""
