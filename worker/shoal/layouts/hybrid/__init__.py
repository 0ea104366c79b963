"""Stages, copies and splits at once, over a mesh of ranks."""
