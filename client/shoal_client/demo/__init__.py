"""`shoal demo`: trains a real model twice on a local cluster, and kills a worker each time."""
