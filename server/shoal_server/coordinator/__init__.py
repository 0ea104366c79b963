"""The coordinator: makes the core's decisions durable in etcd and serves them over gRPC."""
