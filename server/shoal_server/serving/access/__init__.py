"""Who may call what, by the certificates of mutual TLS."""
