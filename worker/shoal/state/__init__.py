"""Training state as shards of named tensors, for any holder and any cut of the tensors."""
