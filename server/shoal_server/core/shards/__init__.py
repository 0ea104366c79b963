"""Shards: how parameters are cut into them, who holds each, and when that changes."""
