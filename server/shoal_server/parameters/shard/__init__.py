"""Shards: values, versions, remembered pushes, replicas, and the catalog of a server's shards."""
