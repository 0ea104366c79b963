"""Copies of shards that other servers lead: following, taking over, leading again from disk."""
