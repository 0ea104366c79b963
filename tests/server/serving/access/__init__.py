"""Tests of access; they share one cluster with TLS."""
