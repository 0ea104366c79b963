"""Access control over HTTP: tokens with roles, sessions of the page, and a log of operations."""
