"""Waits for peers that another thread can end."""
