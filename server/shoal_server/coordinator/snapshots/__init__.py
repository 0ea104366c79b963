"""The Snapshots service: taking and restoring snapshots of what parameter servers hold."""
