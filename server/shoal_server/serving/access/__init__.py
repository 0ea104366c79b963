"""Access control of gRPC calls by the certificates of mutual TLS."""
