"""Exact differences between two versions of published weights. Needs numpy and zstandard, which the
client and the coordinator do without: it is a package of its own for the parts that have them."""
