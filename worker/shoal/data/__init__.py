"""Selection and loading of a step's samples."""
