"""Exact differences between two versions of published weights.

A package of its own, as it needs numpy and zstandard, which client and coordinator lack.
"""
