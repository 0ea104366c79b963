"""The gRPC and bulk services of a parameter server: messages in, shards changed, messages out."""
