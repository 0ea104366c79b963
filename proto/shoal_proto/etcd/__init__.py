"""The part of etcd's gRPC API that Shoal speaks, generated from the .proto file."""
