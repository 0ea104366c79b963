"""Undo of a step that is not committed."""
