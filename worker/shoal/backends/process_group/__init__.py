"""Interface of all backends, and base class for a process group in Python."""
