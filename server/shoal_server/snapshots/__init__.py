"""Snapshots as they lie in storage: manifests, the files that they name, and what is kept."""
