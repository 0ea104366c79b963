"""A certificate authority of a cluster's own."""
