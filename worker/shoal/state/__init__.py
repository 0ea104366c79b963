"""Training state as pieces of named tensors, whoever holds them and however they are cut."""
