"""Calls from the coordinator to parameter servers."""
