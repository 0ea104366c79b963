"""Texts of others on a terminal."""
