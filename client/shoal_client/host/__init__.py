"""Calls of a launcher to the coordinators for all workers of its host."""
