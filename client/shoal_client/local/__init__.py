"""Child processes, and a whole cluster of them."""
