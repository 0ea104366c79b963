"""How much callers may ask of a process at once, and what it keeps for its own work."""
