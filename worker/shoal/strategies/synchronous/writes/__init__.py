"""Detection and undoing of changes to parameters and optimizer state within a step, before the
optimizer's step at its end."""
