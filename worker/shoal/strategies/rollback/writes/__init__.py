"""Detection and undo of a script's changes to parameters and optimizer state within a step."""
