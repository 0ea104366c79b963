"""`shoal demo`: trains a real model twice on a local cluster, killing a worker on the way."""
