"""Embeddings whose rows are stored on the parameter servers."""
