"""The bulk transport: calls with tensors over sockets and shared memory."""
