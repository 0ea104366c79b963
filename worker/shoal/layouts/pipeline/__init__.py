"""A model by stages: cutting it, and running micro-batches through."""
