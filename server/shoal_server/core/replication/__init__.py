"""Who leads a shard, who follows it, and what may be acknowledged: decided without any I/O."""
