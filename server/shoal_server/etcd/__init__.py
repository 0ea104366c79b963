"""Access to etcd: the store's interface, its implementations, election, keys and records."""
