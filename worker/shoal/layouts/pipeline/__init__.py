"""Pipeline layout: the cut of a model into stages, and their run with micro-batches."""
