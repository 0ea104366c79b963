"""What etcd tells of the cluster: servers, members, and which server has which shard."""
