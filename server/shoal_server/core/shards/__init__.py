"""Shards: the cut of parameters into shards, the servers that hold each, and changes of those."""
