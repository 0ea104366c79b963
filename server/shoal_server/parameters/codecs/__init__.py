"""Decoders of compressed gradients."""
