"""Layout of a job's bytes in its shards, and the data that a call sends for a shard."""
