"""Shards that this server leads, and the servers that have copies of them."""
