"""Training state as shards of named tensors, whoever holds them and however they are cut."""
