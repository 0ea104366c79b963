"""Selection of a step's samples: the order that all members share, and leased ranges of it."""
