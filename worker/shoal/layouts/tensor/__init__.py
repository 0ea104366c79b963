"""Tensor parallelism: modules split over ranks that work on the same samples."""
