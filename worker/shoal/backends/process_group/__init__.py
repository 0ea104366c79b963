"""Base of all process groups: the interface, and torch's collectives reduced to a few methods."""
