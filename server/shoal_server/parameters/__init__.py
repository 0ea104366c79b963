"""The parameter server: shards of a model, updated by torch's fused kernels, served over gRPC."""
