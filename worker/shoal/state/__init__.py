"""Training state as shards of named tensors, whichever ranks hold them, in any layout."""
