"""Interface of all backends, and a process group in Python with few methods to implement."""
