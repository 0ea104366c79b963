"""Limits on the load from callers, which keep resources free for a process' own work."""
