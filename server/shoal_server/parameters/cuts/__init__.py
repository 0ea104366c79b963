"""Shards as of one moment, read chunk by chunk while they are written to."""
