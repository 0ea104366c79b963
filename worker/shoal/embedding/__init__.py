"""Embeddings whose rows lie on the parameter servers."""
