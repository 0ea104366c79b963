"""Selection and loading of a step's samples, in an order common to all members."""
