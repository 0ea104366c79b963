"""The Shards service, and the controller that keeps each shard on enough servers."""
