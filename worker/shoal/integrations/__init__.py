"""Shoal under the interfaces of other frameworks."""
