"""Segments of published weights: immutable bytes, their digests, and their transfer."""
