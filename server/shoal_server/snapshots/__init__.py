"""Snapshots in storage: manifests, the files that they name, and which are kept."""
