"""Strategies whose members take each step together."""
