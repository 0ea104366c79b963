"""Comparison of backups with their primary while both are in use."""
