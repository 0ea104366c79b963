"""Interface of all backends, and a process group in Python that needs few methods."""
