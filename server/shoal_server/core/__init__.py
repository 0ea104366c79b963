"""Decisions, and nothing else: no I/O, no clock, no randomness. Time and seeds are arguments."""
