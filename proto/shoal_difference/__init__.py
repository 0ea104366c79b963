"""Exact differences between two versions of published weights. A separate package: it needs numpy
and zstandard.
"""
