"""Strategies whose members step their own replicas and average them at the end of each round."""
