"""Signs of life of a worker, shared with its launcher."""
