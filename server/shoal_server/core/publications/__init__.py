"""Published weights: series of versions, decided without I/O."""
