"""What works without a session: a fixed set of ranks, and plans."""
