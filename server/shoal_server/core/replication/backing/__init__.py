"""Copies of what others lead: following, taking over, leading again from disk."""
