"""Exact differences between two versions of published weights: a package of its own, since it needs
numpy and zstandard, which client and coordinator lack."""
