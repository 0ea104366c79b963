"""Layouts that combine pipeline, data and tensor parallelism over a mesh of ranks."""
