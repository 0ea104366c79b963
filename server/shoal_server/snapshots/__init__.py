"""Snapshots in storage: their manifests and files, and the removal of old snapshots."""
