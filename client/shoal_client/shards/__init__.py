"""Layout of a job's bytes in its shards, and the parts that calls carry."""
