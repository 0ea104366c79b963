"""Shards: the cut of parameters into shards, the servers of each shard, and changes of servers."""
