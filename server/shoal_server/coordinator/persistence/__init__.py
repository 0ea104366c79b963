"""What a coordinator keeps of jobs in etcd: how it is written, and how it is read again."""
