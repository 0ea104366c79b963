"""Tests of access, which share one cluster with TLS."""
