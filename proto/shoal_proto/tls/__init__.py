"""Mutual TLS between the processes of a cluster: this process's certificate, and its callers'."""
