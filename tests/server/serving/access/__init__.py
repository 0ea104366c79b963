"""One cluster with TLS for all tests of this package."""
