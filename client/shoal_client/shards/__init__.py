"""Layout of a job's bytes in its shards."""
