"""Which samples a step trains on: the order that all members share, and leased ranges of it."""
