"""Comparison of backups with their primary."""
