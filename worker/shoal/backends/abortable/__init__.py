"""Waits for peers; another thread can end these waits."""
