"""Parameters cut over the ranks by rows, on torch's fully_shard."""
