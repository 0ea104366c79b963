"""The cluster's own certificate authority."""
