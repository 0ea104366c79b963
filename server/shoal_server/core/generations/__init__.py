"""Generations: rosters, the agreement on a roster, and a job's progress."""
