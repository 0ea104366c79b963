"""Records that several processes read."""
