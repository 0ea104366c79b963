"""Groups over the network, by Gloo and NCCL, whose operations end when a peer is lost."""
