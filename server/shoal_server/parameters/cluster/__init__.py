"""The cluster as recorded in etcd."""
