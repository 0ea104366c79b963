"""Access to etcd: the store's interface, election, keys and records."""
