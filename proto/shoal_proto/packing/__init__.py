"""Compact encodings of data that goes to many members."""
