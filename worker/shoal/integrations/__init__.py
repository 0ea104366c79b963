"""Shoal under the interfaces of other frameworks: one module for each."""
