"""Faults of each part in turn, in a job that is held in each phase."""
