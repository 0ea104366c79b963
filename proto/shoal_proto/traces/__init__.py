"""Traces of what a call led to, where they are asked for."""
