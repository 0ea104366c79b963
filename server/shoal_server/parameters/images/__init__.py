"""Images: shards at one version."""
