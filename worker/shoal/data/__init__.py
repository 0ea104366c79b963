"""Selection of a step's samples: the order common to all members, and leased ranges of it."""
