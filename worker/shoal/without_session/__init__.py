"""Parts of Shoal that work without a session: a fixed set of ranks, and plans."""
