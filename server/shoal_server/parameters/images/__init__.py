"""Images: shards at one version, read chunk by chunk while pushes go on."""
