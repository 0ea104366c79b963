"""Faults of every part, one after another, in a job that is held in each phase."""
