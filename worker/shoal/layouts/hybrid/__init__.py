"""Layouts with pipeline, data and tensor parallelism."""
