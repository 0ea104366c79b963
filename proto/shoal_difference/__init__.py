"""Exact differences between two versions of published weights.

This is a separate package because it needs numpy and zstandard, which client and coordinator lack.
"""
