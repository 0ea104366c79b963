"""Layout of parameters sharded over the ranks by rows, on torch's fully_shard."""
