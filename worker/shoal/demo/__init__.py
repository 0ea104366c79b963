"""The job that `shoal demo` trains: handwritten digits, a small network."""
