"""Shards that this server leads."""
