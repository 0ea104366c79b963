"""Copies of shards that other servers lead."""
