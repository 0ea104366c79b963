"""Layouts of a model over the ranks of one group."""
