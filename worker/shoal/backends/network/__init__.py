"""Groups over the network, Gloo and NCCL, that a lost peer cannot hold up."""
