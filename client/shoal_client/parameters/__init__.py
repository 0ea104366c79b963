"""A job's parameters and tables on its parameter servers."""
