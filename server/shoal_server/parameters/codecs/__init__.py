"""Gradients that come in fewer bytes than their values have, read."""
