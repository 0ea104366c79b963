"""A worker's membership of a job: what it knows, what it decides, and what carries it out."""
