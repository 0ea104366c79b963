"""The coordinator: the core's decisions, made durable in etcd and told over gRPC."""
