"""Shards that are led here, and the servers that follow them."""
