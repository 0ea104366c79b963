"""Shards: how parameters are cut, and which servers hold them."""
