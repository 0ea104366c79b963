"""The cluster as recorded in etcd: servers, members, and assignments of shards."""
