"""The store on a real etcd cluster, over gRPC."""
