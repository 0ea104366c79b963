"""Jobs in etcd: their records, written and read by a coordinator."""
