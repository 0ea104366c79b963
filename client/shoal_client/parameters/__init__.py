"""A job's parameters and tables on its parameter servers: create, pull and push."""
