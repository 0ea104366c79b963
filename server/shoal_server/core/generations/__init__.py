"""Generations: rosters, how far a roster is agreed on, and how far a job has come."""
