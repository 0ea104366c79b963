"""Signs of life of a worker, shared by a launcher and its workers on one host."""
