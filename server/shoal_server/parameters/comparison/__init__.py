"""Comparing the copies of a shard with their primary while both are in use."""
